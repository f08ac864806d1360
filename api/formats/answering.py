"""Responds with a generation, complete or streamed, in the route's format."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol

import structlog
from starlette.requests import Request
from starlette.responses import Response

from ..contract.answer_model import AnswerModel
from ..contract.errors import ApiError, as_api_error, encode_error
from ..http.disconnects import unless_disconnected
from ..http.json_response import encode_json
from ..http.sse import DONE, PING, EventStream, sse_data
from ..http.text_events import TextEvents
from ..inference.generation import TokenCounts
from ..inference.inference import Running
from ..inference.sequence_text import Delta
from ..schemas.answers import CompletionTokensDetails, PromptTokensDetails, Usage

SERVED_HEADERS: Mapping[str, str] = {
    "openai-processing-ms": "From arrival to the first schedule.",
    "x-loraplex-replica": "The fleet's replica that ran the request.",
    "x-loraplex-adapter": "The pinned name of the adapter that answered.",
    "x-loraplex-adapter-version": "Its number.",
    "x-loraplex-digest": "Its content.",
    "x-loraplex-alias": "The requested alias.",
    "x-loraplex-canary": "`true` if the alias's canary was selected.",
    "x-loraplex-tier": "The tier of the weights when the request arrived.",
    "x-loraplex-load-ms": "Duration of the load that the request waited for.",
    "x-loraplex-wait-ms": "Time in which only the adapter was missing.",
    **{
        f"x-ratelimit-{what}-{of}": f"{meaning} of {of} per minute, where they are limited."
        for what, meaning in (
            ("limit", "The limit"),
            ("remaining", "What is left"),
            ("reset", "When all is left again,"),
        )
        for of in ("requests", "tokens")
    },
}
"""Headers of a model's response; those of the adapter only if one answered, the replica's only in a
fleet."""

log = structlog.get_logger(__name__)


Store = Callable[[Usage], Awaitable[None]]
"""Stores a complete answer, before its end is sent."""


class AnswerFormat(Protocol):
    """The format of a route's responses."""

    ending: bytes
    """The end of a successful stream, after its last chunk."""
    ping: bytes
    """What keeps a stream open while there is nothing to tell."""

    def opening(self) -> Iterable[AnswerModel]:
        """The chunks that a stream begins with."""

    def events(self, delta: Delta) -> bytes:
        """The events of a delta; empty if it has no content."""

    def closing(self, usage: Usage) -> Iterable[AnswerModel]:
        """The chunks after the last delta."""

    def event(self, chunk: AnswerModel) -> bytes:
        """A chunk as an event of the stream."""

    def failure(self, error: ApiError, request_id: str) -> bytes:
        """The event that a stream ends with if it fails."""

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> AnswerModel:
        """The whole answer; `choices[index]` are the deltas of one choice."""


class PlainEvents(ABC):
    """The events of chats and completions: the chunk alone."""

    ending = DONE
    ping = PING

    def __init__(self) -> None:
        self._texts: dict[int, TextEvents] = {}
        """By choice."""

    @abstractmethod
    def is_plain(self, index: int) -> bool:
        """The next delta of this choice, if it has only text, is one chunk with nothing else."""

    @abstractmethod
    def chunks(self, delta: Delta) -> Iterable[AnswerModel]:
        """The chunks of a delta; none if it has no content."""

    @abstractmethod
    def text_chunk(self, index: int, text: str) -> AnswerModel:
        """The chunk of a delta that only adds text to a choice."""

    def events(self, delta: Delta) -> bytes:
        is_text = delta.text and delta.finish_reason is None and delta.is_text
        if is_text and self.is_plain(delta.index):
            texts = self._texts.get(delta.index) or self._add_texts(delta.index)
            return texts.event(delta.text)
        return b"".join(map(self.event, self.chunks(delta)))

    def event(self, chunk: AnswerModel) -> bytes:
        return sse_data(encode_json(chunk))

    def failure(self, error: ApiError, request_id: str) -> bytes:
        return sse_data(encode_error(error, request_id))

    def _add_texts(self, index: int) -> TextEvents:
        texts = TextEvents(lambda text: self.event(self.text_chunk(index, text)))
        self._texts[index] = texts
        return texts


async def answer_whole(
    request: Request, running: Running, form: AnswerFormat, store: Store | None = None
) -> Response:
    """Wait for everything. Raises ApiError or ClientDisconnected; either way nothing runs on."""
    generation = running.generation
    try:
        choices = await unless_disconnected(request.receive, generation.whole())
        usage = usage_of(generation.counts)
        body = encode_json(form.whole(choices, usage))
        if store is not None:
            await store(usage)
    finally:
        await generation.aclose()
    return Response(body, media_type="application/json", headers=answer_headers(running))


def answer_stream(
    request: Request, running: Running, form: AnswerFormat, store: Store | None = None
) -> Response:
    """Stream each delta as it arrives; takes ownership of the generation."""

    def send_at_once(delta: Delta) -> bool:
        reader = stream.reader
        if reader is None or reader.unread_since is not None:
            return False
        if event := form.events(delta):
            reader.send_at_once(event)
        return True

    stream = EventStream(
        _events(request, running, form, send_at_once, store),
        headers=answer_headers(running),
        close=running.generation.aclose,
        ping=form.ping,
        patience_seconds=request.app.state.runtime.settings.reader_patience_seconds,
    )
    return stream


def usage_of(counts: TokenCounts) -> Usage:
    return Usage(
        prompt_tokens=counts.num_prompt_tokens,
        completion_tokens=counts.num_completion_tokens,
        total_tokens=counts.num_prompt_tokens + counts.num_completion_tokens,
        prompt_tokens_details=PromptTokensDetails(counts.num_cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=counts.num_accepted_tokens,
            rejected_prediction_tokens=counts.num_draft_tokens - counts.num_accepted_tokens,
            reasoning_tokens=counts.num_reasoning_tokens,
        ),
    )


def answer_headers(running: Running) -> dict[str, str]:
    """The replica and the version that answer, the tier, and the wait time."""
    started, model = running.started, running.order.model
    elapsed = time.monotonic() - running.order.arrived_at
    headers = {"openai-processing-ms": str(round(elapsed * 1000))}
    if started.replica is not None:
        headers["x-loraplex-replica"] = started.replica
    adapter, key = model.adapter, model.key
    if adapter is None or key is None:
        return headers
    headers |= {
        "x-loraplex-adapter": model.name,
        "x-loraplex-digest": key.digest,
        "x-loraplex-tier": str(started.adapter_tier),
        "x-loraplex-load-ms": str(round(started.adapter_load_ms or 0.0)),
        "x-loraplex-wait-ms": str(round(started.adapter_wait_seconds * 1000)),
    }
    if model.composition is not None:
        return headers
    headers["x-loraplex-adapter-version"] = str(adapter.version)
    if adapter.alias is not None:
        headers["x-loraplex-alias"] = adapter.alias
        headers["x-loraplex-canary"] = "true" if adapter.is_canary else "false"
    return headers


async def _events(
    request: Request,
    running: Running,
    form: AnswerFormat,
    take: Callable[[Delta], bool],
    store: Store | None,
) -> AsyncIterator[bytes]:
    try:
        for chunk in form.opening():
            yield form.event(chunk)
        async for deltas in running.generation.deltas(take):
            if said := b"".join(map(form.events, deltas)):
                yield said
        usage = usage_of(running.generation.counts)
        if store is not None:
            await store(usage)
        closing = form.closing(usage)
        yield b"".join(map(form.event, closing)) + form.ending
    except Exception as exc:  # the stream has begun, so its last event reports the error
        error = as_api_error(exc)
        if error.code == "internal_error":
            log.exception("stream_failed_unexpectedly", request_id=running.order.request_id)
        request.state.error_code = error.code
        yield form.failure(error, running.order.request_id)
