"""The events of one request, on their way from the engine's client to one consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from .messages import (
    GenerationRequest,
    PromptRead,
    RequestFinished,
    RequestStarted,
    TokensGenerated,
)

RequestEvent = RequestStarted | PromptRead | TokensGenerated | RequestFinished


class RequestStream:
    """An async iterator over a request's events; exactly one RequestFinished ends it.

    The client's registry owns the request and what it holds in the engine, not this object: one
    that is never iterated loses nothing but its consumer, and ends with its max_tokens. A slow
    consumer holds up nobody: what waits for it is bounded by max_tokens too.
    """

    def __init__(
        self, request: GenerationRequest, *, abort: Callable[[RequestStream], None]
    ) -> None:
        self.request = request
        self.expiry: asyncio.TimerHandle | None = None
        """Ends the request some time after its deadline, should the engine not."""
        self.num_submissions = 0
        """How many engine processes have been given this request."""
        self.num_generated_tokens = 0
        self.is_started = False
        self.is_aborted = False
        self._abort = abort
        self._is_finished = False
        self._is_exhausted = False
        self._events: asyncio.Queue[RequestEvent | None] = asyncio.Queue()
        """None: nothing follows, the stream was closed."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestEvent:
        if self._is_exhausted:
            raise StopAsyncIteration
        event = await self._events.get()
        self._is_exhausted = event is None or isinstance(event, RequestFinished)
        if event is None:
            raise StopAsyncIteration
        return event

    def abort(self) -> None:
        """End the request early; its RequestFinished comes as ever. Idempotent."""
        if not (self._is_finished or self.is_aborted):
            self.is_aborted = True
            self._abort(self)

    async def aclose(self) -> None:
        """End the request early and take no further events. Idempotent."""
        self.abort()
        self._is_exhausted = True
        self._events.put_nowait(None)

    def feed(self, event: RequestEvent) -> None:
        """Take the next event: the client's side."""
        self.is_started |= isinstance(event, RequestStarted)
        if isinstance(event, RequestFinished):
            self._is_finished = True
            if self.expiry is not None:
                self.expiry.cancel()
        if isinstance(event, TokensGenerated):
            self.num_generated_tokens += len(event.token_ids)
        if not self._is_exhausted:
            self._events.put_nowait(event)
