"""The streams of open requests, and the ends that no engine reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..errors import DeadlineExceeded, EngineError, InvalidParameter, Overloaded
from ..messages import (
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    PromptOutput,
    RequestFinished,
    RequestStarted,
    TokensGenerated,
)
from .request_stream import RequestStream

DEADLINE_SLACK_SECONDS = 0.5
"""The engine ends requests at their deadline. If it is stuck, they are ended here this much
later."""
OVERLOAD_RETRY_SECONDS = 1.0


class RequestStreams:
    """The streams by request id. Each ends with exactly one RequestFinished."""

    def __init__(
        self,
        *,
        max_requests: int,
        note_end: Callable[[RequestStream, RequestFinished], None],
        abandon: Callable[[RequestStream], object],
    ) -> None:
        """`note_end` is called with each end before the consumer gets it; `abandon` tells the
        engine of a request that has passed its deadline."""
        self._max_requests = max_requests
        self._note_end = note_end
        self._abandon = abandon
        self._streams: dict[str, RequestStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[RequestStream]:
        """Over a copy: streams may end meanwhile."""
        return iter(list(self._streams.values()))

    def find(self, request_id: str) -> RequestStream | None:
        """The open request's stream."""
        return self._streams.get(request_id)

    def check_room(self, request_id: str) -> None:
        """Raises InvalidParameter if a request with this id is open, Overloaded if too many are."""
        if request_id in self._streams:
            raise InvalidParameter("request_id", "is in use")
        if len(self._streams) >= self._max_requests:
            raise Overloaded(retry_after_seconds=OVERLOAD_RETRY_SECONDS)

    def open(self, stream: RequestStream) -> None:
        """The request was sent; from now on it has a deadline."""
        request = stream.request
        self._streams[request.request_id] = stream
        if request.deadline_seconds is not None:
            stream.expiry = asyncio.get_running_loop().call_later(
                request.deadline_seconds + DEADLINE_SLACK_SECONDS, self._expire, stream
            )

    def feed(self, events: Sequence[RequestStarted | PromptOutput | TokensGenerated]) -> None:
        """Deliver the events to their requests; those of finished requests are dropped."""
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.feed(event)

    def finish(self, event: RequestFinished) -> None:
        """Deliver an end; no effect if the request has ended."""
        stream = self._streams.pop(event.request_id, None)
        if stream is not None:
            self._note_end(stream, event)
            stream.feed(event)

    def end(self, stream: RequestStream, error: EngineError) -> None:
        """End a request without a message from the engine."""
        finished = RequestFinished(
            request_id=stream.request.request_id,
            reason=FinishReason.ERROR,
            num_prompt_tokens=len(stream.request.prompt_token_ids),
            num_generated_tokens=stream.num_generated_tokens,
            error=ErrorInfo(error.code, str(error), error.retry_after_seconds),
        )
        if stream.is_aborted:
            finished = replace(finished, reason=FinishReason.ABORTED, error=None)
        self.finish(finished)

    def _expire(self, stream: RequestStream) -> None:
        self._abandon(stream)
        self.end(stream, DeadlineExceeded())


def as_left(stream: RequestStream) -> GenerationRequest:
    """The request as it is sent now: after its first submission, with the time that it has left.

    The output of one that is sent again is not remembered: an earlier engine may have been told to
    forget it.
    """
    request = stream.request
    if stream.num_submissions:
        request = replace(request, remembers_output=False)
    if stream.expiry is None:
        return request
    seconds = stream.expiry.when() - DEADLINE_SLACK_SECONDS
    left = max(0.0, seconds - asyncio.get_running_loop().time())
    return replace(request, deadline_seconds=left)
