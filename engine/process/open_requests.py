"""All open requests of one engine, across its processes.

When a process dies, requests that had started end with `engine_restarted`. The others are sent to
the next process, once.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace

from ...adapters.identity import AdapterKey
from ..errors import EngineError, EngineRestarted, EngineUnavailable
from ..messages import Abort, EngineCrashed, GenerationRequest, RequestFinished, StepEvents, Submit
from ..token_journal import SlotCounter
from .quarantine import Quarantine, crash_of
from .request_stream import RequestEvent, RequestStream
from .request_streams import RequestStreams, as_left
from .supervisor import Supervisor

MAX_SUBMISSIONS = 2


class OpenRequests:
    """Sends the requests to the process and its events to their streams."""

    def __init__(
        self,
        supervisor: Supervisor,
        quarantine: Quarantine,
        *,
        max_requests: int,
        max_submissions: int = MAX_SUBMISSIONS,
    ) -> None:
        """`max_submissions`: the number of processes that may receive a request."""
        self._supervisor = supervisor
        self._quarantine = quarantine
        self._max_submissions = max_submissions
        self._streams = RequestStreams(
            max_requests=max_requests, note_end=self._note_end, abandon=self._send_abort
        )

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
        self._streams.open(stream)
        return stream

    # --- the process ------------------------------------------------------------------------------

    def deliver(self, events: StepEvents) -> None:
        """Deliver the events to their requests; events of finished requests are dropped."""
        for group in (events.started, events.prompts, events.tokens):
            self._streams.feed(group)
        for end in events.finished:
            self._streams.finish(end)

    def resubmit(self) -> None:
        """Send all open requests to a new process, except those that are now in quarantine."""
        for stream in self._streams:
            if objection := self._quarantine.objection(stream.request):
                self._streams.end(stream, objection)
            else:
                self._send(stream)

    def note_crash(self, step_request_ids: Set[str]) -> EngineCrashed:
        """The process died in a step of these requests, which are now suspects."""
        streams = map(self._streams.find, step_request_ids)
        requests = [stream.request for stream in streams if stream]
        is_whole = len(requests) == len(step_request_ids)
        lone_keys = {request.lone_key for request in requests}
        crash = crash_of(requests, is_alone=is_whole and len(lone_keys) == 1)
        self._quarantine.note_crash(crash)
        return crash

    def settle(self) -> None:
        """The process has died: end the requests that had started, and keep the others for the next
        process."""
        for stream in self._streams:
            is_last = stream.num_submissions == self._max_submissions
            if stream.is_started or stream.is_aborted or is_last:
                objection = self._quarantine.objection(stream.request)
                self._streams.end(stream, objection or EngineRestarted())

    def end_adapter(self, key: AdapterKey, error: EngineError) -> int:
        """End the requests that use this adapter while no process runs; returns how many."""
        streams = [stream for stream in self._streams if stream.request.uses(key)]
        for stream in streams:
            self._streams.end(stream, error)
        return len(streams)

    def end_all(self, error: EngineError) -> None:
        """End all requests, because no further process is started."""
        for stream in self._streams:
            self._streams.end(stream, error)

    # --- one request ------------------------------------------------------------------------------

    def _check_acceptable(self, request: GenerationRequest) -> None:
        if not self._supervisor.is_ready:
            raise EngineUnavailable
        self._streams.check_room(request.request_id)
        if objection := self._quarantine.objection(request):
            raise objection

    def _send(self, stream: RequestStream) -> None:
        request = as_left(stream)
        num_lone_steps = self._quarantine.num_lone_steps(request)
        if num_lone_steps > request.num_lone_steps:
            request = replace(request, num_lone_steps=num_lone_steps)
        self._supervisor.send(Submit(request))
        stream.num_submissions += 1

    def _abort(self, stream: RequestStream) -> None:
        if self._supervisor.is_ready:
            self._send_abort(stream)
        else:
            self._streams.end(stream, EngineRestarted())

    def _send_abort(self, stream: RequestStream) -> None:
        self._supervisor.send(Abort(stream.request.request_id))

    def _note_end(self, stream: RequestStream, event: RequestFinished) -> None:
        self._quarantine.note_end(stream.request, event)
