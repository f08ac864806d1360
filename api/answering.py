"""Answering with a generation: whole or as a stream, in the format of the route."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Protocol

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response

from .disconnects import unless_disconnected
from .errors import as_api_error, encode_error
from .json_response import encode_json
from .schemas.answers import CompletionTokensDetails, PromptTokensDetails, Usage
from .services.generation import TokenCounts
from .services.inference import Running
from .services.sequence_text import Delta
from .sse import DONE, EventStream, sse_data

log = structlog.get_logger(__name__)


class AnswerFormat(Protocol):
    """How a route's answers look."""

    def opening(self) -> Iterator[msgspec.Struct]:
        """The chunks that a stream begins with."""

    def chunk(self, delta: Delta) -> msgspec.Struct | None:
        """The chunk of a delta; None if it says nothing."""

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """The chunk without choices that ends a stream."""

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> msgspec.Struct:
        """The whole answer; `choices[index]` are the deltas of one choice."""


async def answer_whole(request: Request, running: Running, form: AnswerFormat) -> Response:
    """Wait for everything. Raises ApiError or ClientDisconnected; either way nothing runs on."""
    generation = running.generation
    try:
        choices = await unless_disconnected(request.receive, collect(running))
        body = encode_json(form.whole(choices, usage_of(generation.counts)))
    finally:
        await generation.aclose()
    return Response(body, media_type="application/json", headers=answer_headers(running))


def answer_stream(
    request: Request, running: Running, form: AnswerFormat, *, includes_usage: bool
) -> Response:
    """Send each delta as it comes; owns the generation from here on."""
    return EventStream(
        _events(request, running, form, includes_usage=includes_usage),
        headers=answer_headers(running),
        close=running.generation.aclose,
        patience_seconds=request.app.state.runtime.settings.reader_patience_seconds,
    )


def usage_of(counts: TokenCounts) -> Usage:
    return Usage(
        prompt_tokens=counts.num_prompt_tokens,
        completion_tokens=counts.num_completion_tokens,
        total_tokens=counts.num_prompt_tokens + counts.num_completion_tokens,
        prompt_tokens_details=PromptTokensDetails(counts.num_cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=counts.num_accepted_tokens,
            rejected_prediction_tokens=counts.num_draft_tokens - counts.num_accepted_tokens,
        ),
    )


def answer_headers(running: Running) -> dict[str, str]:
    """Which version answers, where it was, and what the wait was."""
    started, adapter = running.started, running.order.model.adapter
    elapsed = time.monotonic() - running.order.arrived_at
    headers = {"openai-processing-ms": str(round(elapsed * 1000))}
    if adapter is None:
        return headers
    headers |= {
        "x-loraplex-adapter": adapter.pinned,
        "x-loraplex-adapter-version": str(adapter.version),
        "x-loraplex-digest": adapter.key.digest,
        "x-loraplex-tier": str(started.adapter_tier),
        "x-loraplex-load-ms": str(round(started.adapter_load_ms or 0.0)),
        "x-loraplex-wait-ms": str(round(started.adapter_wait_seconds * 1000)),
    }
    if adapter.alias is not None:
        headers["x-loraplex-alias"] = adapter.alias
        headers["x-loraplex-canary"] = "true" if adapter.is_canary else "false"
    return headers


async def collect(running: Running) -> list[list[Delta]]:
    """All deltas of each choice. Raises ApiError."""
    order = running.order
    choices: list[list[Delta]] = [[] for _ in range(len(order.prompts) * order.num_choices)]
    async for delta in running.generation.deltas():
        choices[delta.index].append(delta)
    return choices


async def _events(
    request: Request, running: Running, form: AnswerFormat, *, includes_usage: bool
) -> AsyncIterator[bytes]:
    try:
        for chunk in form.opening():
            yield sse_data(encode_json(chunk))
        async for delta in running.generation.deltas():
            if (next_chunk := form.chunk(delta)) is not None:
                yield sse_data(encode_json(next_chunk))
        if includes_usage:
            yield sse_data(encode_json(form.usage_chunk(usage_of(running.generation.counts))))
        yield DONE
    except Exception as exc:
        error = as_api_error(exc)
        if error.code == "internal_error":
            log.exception("stream_failed_unexpectedly", request_id=running.order.request_id)
        request.state.error_code = error.code
        yield sse_data(encode_error(error, running.order.request_id))
