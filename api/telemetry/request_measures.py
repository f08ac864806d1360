"""The figures of one request for its log line and its span, never text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...platform.adapters.canary_sums import Arm
from ...platform.quotas.standing import Standing

CLIENT_DISCONNECTED = "client_disconnected"
"""The error code in the log and the metrics of a request whose caller disconnected."""


@dataclass(slots=True)
class RequestMeasures:
    """Filled in as values become known; None if the request did not get that far."""

    model: str | None = None
    """The pinned name."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    queue_seconds: float | None = None
    """For the sequence that started first, like the others."""
    adapter_wait_seconds: float | None = None
    first_token_seconds: float | None = None
    finish_reason: str | None = None
    """For the sequence that ended last; `aborted` if the answer is incomplete."""
    adapter_name: str | None = None
    """None for the base model, as the next."""
    adapter_version: int | None = None
    tier: str | None = None
    """The adapter's tier at arrival."""
    load_ms: float | None = None
    """The duration of the load that it waited for."""
    asked_model: str | None = None
    """The model name as sent, for the tenant's own request log, and for routers while the request
    is open (`--vllm-metrics`)."""
    standing: Standing | None = None
    """The tenant's remaining rates: for the response headers, not a figure of the request."""
    arm: Arm | None = None
    """Where it is counted, if its alias has a watched canary; the next two are for this only."""
    is_refusal: bool | None = None
    """Whether the first choice is a refusal; None: there is no answer."""
    token_seconds: float | None = None
    """TPOT of the first choice."""

    def figures(self) -> Mapping[str, str | int | float]:
        """The known figures, by name."""
        known = {name: getattr(self, name) for name in _FIGURES}
        return {name: value for name, value in known.items() if value is not None}


_OTHERS = ("asked_model", "standing", "arm", "is_refusal", "token_seconds")
_FIGURES = tuple(name for name in RequestMeasures.__slots__ if name not in _OTHERS)
