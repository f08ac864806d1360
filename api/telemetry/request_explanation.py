"""Explains a request's latency or refusal: its phases, and the decisive one."""

from __future__ import annotations

from collections.abc import Iterator

from ...platform.requests.models import RequestLogEntry
from ..contract.error_codes import ERROR_CODES
from ..schemas.requests import PhaseView
from .request_measures import CLIENT_DISCONNECTED

_SAY_THEMSELVES = frozenset({"adapter_load_failed"})
"""Codes that are retryable in some cases only."""
_TIERS = {
    "device": "was on the device",
    "host": "was in host memory and had to be copied to the device",
    "disk": "was on this machine's disk and had to be read",
    "store": "had to be fetched from the store",
}


def phases_of(entry: RequestLogEntry) -> list[PhaseView]:
    """The parts of its time that are known, in their order."""
    return list(_phases(entry))


def summary_of(entry: RequestLogEntry) -> str:
    """The explanation in a sentence or two."""
    if entry.error_code == CLIENT_DISCONNECTED:
        return "The client disconnected before the answer was complete."
    if entry.error_code is not None:
        return _refusal(entry.error_code)
    phases = phases_of(entry)
    if not phases:
        return "It was answered; its phases are not known."
    longest = max(phases, key=lambda phase: phase.ms)
    return f"Most of its time, {longest.ms:.0f} of {entry.total_ms:.0f} ms: {longest.summary}"


def _refusal(code: str) -> str:
    published = ERROR_CODES.get(code)
    if published is None:
        return f"It ended with `{code}`."
    is_known = published.retryable and code not in _SAY_THEMSELVES
    again = "The same request may succeed later." if is_known else ""
    return f"It ended with `{code}`: {published.meaning} {again}".strip()


def _phases(entry: RequestLogEntry) -> Iterator[PhaseView]:
    if entry.queue_ms is None:
        if entry.finish_reason is not None:
            yield PhaseView("queue", entry.total_ms, "It was cancelled while it waited.")
        elif entry.error_code is not None:
            yield PhaseView(
                "refused", entry.total_ms, "It was refused before it reached the engine."
            )
        return
    adapter_ms = entry.adapter_wait_ms or 0.0
    yield PhaseView("queue", entry.queue_ms - adapter_ms, "It waited in the queue.")
    if entry.tier is not None:
        where = _TIERS.get(entry.tier, "was somewhere else")
        yield PhaseView("adapter", adapter_ms, f"Its adapter {where}.")
    if entry.first_token_ms is None:
        return
    prompt = f"Its {entry.prompt_tokens or 0} prompt tokens, {entry.cached_tokens or 0} of them"
    yield PhaseView(
        "prompt",
        max(0.0, entry.first_token_ms - entry.queue_ms),
        f"{prompt} known already, were computed, to the first token.",
    )
    yield PhaseView(
        "output",
        max(0.0, entry.total_ms - entry.first_token_ms),
        f"Its {entry.completion_tokens or 0} tokens were generated and sent.",
    )
