"""All open requests, across engine processes.

When a process dies, requests that had started end with `engine_restarted`. The others are sent to
the next process, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from ...adapters.identity import AdapterKey
from ..errors import (
    DeadlineExceeded,
    EngineError,
    EngineRestarted,
    EngineUnavailable,
    InvalidParameter,
    Overloaded,
)
from ..messages import (
    Abort,
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    PromptOutput,
    RequestFinished,
    RequestStarted,
    StepEvents,
    Submit,
    TokensGenerated,
)
from ..token_journal import SlotCounter
from .quarantine import Quarantine
from .request_stream import RequestEvent, RequestStream
from .supervisor import Supervisor

MAX_SUBMISSIONS = 2
DEADLINE_SLACK_SECONDS = 0.5
"""The engine ends requests at their deadline. If it is stuck, they are ended here this much
later."""
OVERLOAD_RETRY_SECONDS = 1.0


class OpenRequests:
    """The streams of the requests."""

    def __init__(
        self,
        supervisor: Supervisor,
        quarantine: Quarantine,
        *,
        max_requests: int,
    ) -> None:
        self._supervisor = supervisor
        self._quarantine = quarantine
        self._max_requests = max_requests
        self._streams: dict[str, RequestStream] = {}
        """The streams of open requests, by id."""

    def __len__(self) -> int:
        return len(self._streams)

    # --- callers ----------------------------------------------------------------------------------

    def submit(
        self,
        request: GenerationRequest,
        take: Callable[[RequestEvent], None] | None = None,
        counter: SlotCounter | None = None,
    ) -> RequestStream:
        """Send a request to the process; see `Engine.submit`."""
        self._check_acceptable(request)
        stream = RequestStream(request, abort=self._abort, take=take, counter=counter)
        self._send(stream)  # a request that cannot be sent is not open
        self._streams[request.request_id] = stream
        if request.deadline_seconds is not None:
            stream.expiry = asyncio.get_running_loop().call_later(
                request.deadline_seconds + DEADLINE_SLACK_SECONDS, self._expire, stream
            )
        return stream

    # --- the process ------------------------------------------------------------------------------

    def deliver(self, events: StepEvents) -> None:
        """Deliver the events to their requests; events of finished requests are dropped."""
        for group in (events.started, events.prompts, events.tokens):
            self._feed(group)
        for end in events.finished:
            self._finish(end)

    def resubmit(self) -> None:
        """Send all open requests to a new process, except those that are now in quarantine."""
        for stream in list(self._streams.values()):
            if objection := self._quarantine.objection(stream.request):
                self._end(stream, objection)
            else:
                self._send(stream)

    def note_crash(self, step_request_ids: Set[str]) -> None:
        """The process died in a step of these requests, which are now suspects."""
        self._quarantine.note_crash(
            [self._streams[name].request for name in step_request_ids & self._streams.keys()],
            is_alone=len(step_request_ids) == 1,
        )

    def settle(self) -> None:
        """The process has died: end the requests that had started, and keep the others for the next
        process."""
        for stream in list(self._streams.values()):
            if stream.is_started or stream.is_aborted or stream.num_submissions == MAX_SUBMISSIONS:
                objection = self._quarantine.objection(stream.request)
                self._end(stream, objection or EngineRestarted())

    def end_adapter(self, key: AdapterKey, error: EngineError) -> int:
        """End the requests for this adapter while no process runs; returns how many."""
        streams = [s for s in self._streams.values() if s.request.adapter == key]
        for stream in streams:
            self._end(stream, error)
        return len(streams)

    def end_all(self, error: EngineError) -> None:
        """End all requests, because no further process is started."""
        for stream in list(self._streams.values()):
            self._end(stream, error)

    # --- one request ------------------------------------------------------------------------------

    def _check_acceptable(self, request: GenerationRequest) -> None:
        if not self._supervisor.is_ready:
            raise EngineUnavailable
        if request.request_id in self._streams:
            raise InvalidParameter("request_id", "is in use")
        if len(self._streams) >= self._max_requests:
            raise Overloaded(retry_after_seconds=OVERLOAD_RETRY_SECONDS)
        if objection := self._quarantine.objection(request):
            raise objection

    def _send(self, stream: RequestStream) -> None:
        stream.num_submissions += 1
        request = stream.request
        if stream.expiry is not None and stream.num_submissions > 1:
            seconds = stream.expiry.when() - DEADLINE_SLACK_SECONDS
            left = max(0.0, seconds - asyncio.get_running_loop().time())
            request = replace(request, deadline_seconds=left)
        if num_lone_steps := self._quarantine.num_lone_steps(request):
            request = replace(request, num_lone_steps=num_lone_steps)
        self._supervisor.send(Submit(request))

    def _feed(self, events: Sequence[RequestStarted | PromptOutput | TokensGenerated]) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.feed(event)

    def _abort(self, stream: RequestStream) -> None:
        if self._supervisor.is_ready:
            self._supervisor.send(Abort(stream.request.request_id))
        else:
            self._end(stream, EngineRestarted())

    def _expire(self, stream: RequestStream) -> None:
        self._supervisor.send(Abort(stream.request.request_id))
        self._end(stream, DeadlineExceeded())

    def _end(self, stream: RequestStream, error: EngineError) -> None:
        """End a request without a message from the process."""
        finished = RequestFinished(
            request_id=stream.request.request_id,
            reason=FinishReason.ERROR,
            num_prompt_tokens=len(stream.request.prompt_token_ids),
            num_generated_tokens=stream.num_generated_tokens,
            error=ErrorInfo(error.code, str(error), error.retry_after_seconds),
        )
        if stream.is_aborted:
            finished = replace(finished, reason=FinishReason.ABORTED, error=None)
        self._finish(finished)

    def _finish(self, event: RequestFinished) -> None:
        stream = self._streams.pop(event.request_id, None)
        if stream is not None:
            self._quarantine.note_end(stream.request, event)
            stream.feed(event)
