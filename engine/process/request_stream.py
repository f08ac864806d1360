"""The events of one request, from the engine's client to one consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from ..messages import (
    GenerationRequest,
    PromptOutput,
    RequestFinished,
    RequestStarted,
    TokensGenerated,
)
from ..token_journal import SlotCounter
from .request_end import RequestEnd

RequestEvent = RequestStarted | PromptOutput | TokensGenerated | RequestFinished


class RequestStream:
    """A request's events, to iterate over or delivered to `take`; RequestFinished is the last.

    The client's registry owns the request and its resources in the engine, not this object: a
    stream that is never iterated ends with its max_tokens. A slow consumer delays nothing else: its
    pending events are bounded by max_tokens too.
    """

    def __init__(
        self,
        request: GenerationRequest,
        *,
        abort: Callable[[RequestStream], None],
        take: Callable[[RequestEvent], None] | None = None,
        counter: SlotCounter | None = None,
    ) -> None:
        """`take` is called with each event when it arrives, so that no task has to wake up; it must
        not raise. `counter` counts the tokens of each event before the consumer gets it."""
        self.request = request
        self.expiry: asyncio.TimerHandle | None = None
        """Ends the request after its deadline if the engine does not."""
        self.num_submissions = 0
        """The number of engine processes that received this request."""
        self.num_generated_tokens = 0
        self.is_started = False
        self.is_aborted = False
        self._abort = abort
        self._counter = counter
        self.end = RequestEnd()
        self._is_exhausted = False
        self._events: asyncio.Queue[RequestEvent | None] = asyncio.Queue()
        """None marks the end of a closed stream."""
        self._take = take or self._events.put_nowait

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
        """End the request early; its RequestFinished arrives as usual. Idempotent."""
        if not (self.end.has_come or self.is_aborted):
            self.is_aborted = True
            self._abort(self)

    def close(self) -> None:
        """End the request early; take and count no further events. Idempotent."""
        self._is_exhausted = True
        self._counter = None  # its slot may soon be another's
        self.abort()
        self._events.put_nowait(None)

    async def aclose(self) -> None:
        """Close it, for `aclosing`."""
        self.close()

    def feed(self, event: RequestEvent) -> None:
        """Take the next event: the client's side. Its tokens are counted before it is handed on, so
        that the consumer sees no token that a crash would leave uncharged."""
        if isinstance(event, TokensGenerated):
            self.num_generated_tokens += len(event.token_ids)
            if self._counter is not None:
                self._counter.generate(self.num_generated_tokens)
        elif isinstance(event, RequestStarted):
            self.is_started = True
            if self._counter is not None:
                self._counter.start(
                    num_prompt_tokens=len(self.request.prompt_token_ids),
                    num_cached_tokens=event.num_cached_tokens,
                )
        elif isinstance(event, RequestFinished):
            self.end.come(event)
            if self.expiry is not None:
                self.expiry.cancel()
        if not self._is_exhausted:
            self._take(event)
