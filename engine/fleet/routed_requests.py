"""An API server's open requests, each at one replica of the fleet.

A replica that refuses a request is left out, and the request is sent to another one. A request that
was lost before it had started is sent to another one too, once; if none is ready, it waits for one.
Requests that had started end with `engine_restarted`.

A poisonous adapter ends two engines at most. Until it is proven, all its requests run on one
replica, so they end one engine and make it a suspect. All of them then run on the next replica,
apart from others, so they end that engine and are known as the cause. From then on it is refused,
and what is open of it anywhere ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ...adapters.identity import AdapterKey
from ..errors import (
    AdapterQuarantined,
    EngineError,
    EngineRestarted,
    EngineUnavailable,
    NotNow,
)
from ..messages import (
    Abort,
    EngineCrashed,
    GenerationRequest,
    Prefetch,
    PrefixPiece,
    RequestFinished,
    StepEvents,
    Submit,
    ToAgent,
)
from ..process.quarantine import Quarantine
from ..process.request_stream import RequestEvent, RequestStream
from ..process.request_streams import RequestStreams, as_left
from ..token_journal import SlotCounter
from .adapter_name import adapter_name
from .errors import NoReplicaReady
from .handover_counts import HandoverFigures
from .handovers import Handovers
from .prefix_hashes import prefix_hashes
from .router import RoutedRequest, Router

MAX_LOSSES = 1
"""The number of replicas that may be lost with a request which had not started."""
MAX_WAIT_SECONDS = 60.0
"""How long a lost request waits until a replica is ready."""
REFUSALS = frozenset({EngineUnavailable.code, NotNow.code})
"""The replica has not accepted the request; another one may."""


@dataclass(slots=True)
class _Sent:
    """Where a request is."""

    stream: RequestStream
    routed: RoutedRequest
    replica: str | None = None
    """None: it waits until a replica is ready."""
    left_out: set[str] = field(default_factory=set)
    """Replicas that refused it, or were lost with it."""
    num_losses: int = 0
    waiting: asyncio.TimerHandle | None = None


class RoutedRequests:
    """Chooses the replicas and delivers the events."""

    def __init__(
        self,
        router: Router,
        quarantine: Quarantine,
        send: Callable[[str, ToAgent], bool],
        *,
        has_room: Callable[[str], bool],
        share_memory: Callable[[str, str], bool],
        max_requests: int,
    ) -> None:
        """`send` sends a message to the replica of this name; False if it cannot. `has_room` and
        `share_memory`: see `Handovers`."""
        self._router = router
        self._quarantine = quarantine
        self._send_to = send
        self._handovers = Handovers(
            router, send, has_room, time.monotonic, _call_later, share_memory
        )
        self._streams = RequestStreams(
            max_requests=max_requests, note_end=self._note_end, abandon=self._send_abort
        )
        self._sent: dict[str, _Sent] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def num_open_at(self, replica: str) -> int:
        """The number of open requests there."""
        return sum(sent.replica == replica for sent in self._sent.values())

    def handovers_of(self, replica: str) -> HandoverFigures:
        """The prefixes that the replica has sent to others, or got from them."""
        return self._handovers.counts.of(replica)

    # --- callers ----------------------------------------------------------------------------------

    def submit(
        self,
        request: GenerationRequest,
        take: Callable[[RequestEvent], None] | None = None,
        counter: SlotCounter | None = None,
    ) -> RequestStream:
        """Send a request to a replica; see `Engine.submit`. Raises NoReplicaReady if none is."""
        self._streams.check_room(request.request_id)
        if objection := self._quarantine.objection(request):
            raise objection
        stream = RequestStream(request, abort=self._abort, take=take, counter=counter)
        sent = _Sent(stream, self._as_routed(request))
        self._send(sent)
        self._sent[request.request_id] = sent
        self._streams.open(stream)
        return stream

    def end_adapter(self, key: AdapterKey, error: EngineError) -> int:
        """End the requests that use this adapter and wait for a replica; returns how many."""
        waiting = [each for each in self._sent.values() if each.replica is None]
        ended = [each.stream for each in waiting if each.stream.request.uses(key)]
        for stream in ended:
            self._streams.end(stream, error)
        return len(ended)

    def end_all(self, error: EngineError) -> None:
        """End all requests."""
        for stream in self._streams:
            self._streams.end(stream, error)

    # --- replicas ---------------------------------------------------------------------------------

    def deliver(self, replica: str, events: StepEvents) -> None:
        """Deliver a replica's events; those of requests that are not there any more are dropped."""
        self._handovers.note(replica, events)
        started = [
            replace(self._handovers.as_cached(each), replica=replica) for each in events.started
        ]
        for group in (started, events.prompts, events.tokens):
            self._streams.feed([each for each in group if self._is_at(each.request_id, replica)])
        for end in events.finished:
            if self._is_at(end.request_id, replica):
                self._finish(self._handovers.with_prefill(end))

    def relay(self, replica: str, piece: PrefixPiece) -> None:
        """Pass on a part of a prefix that the replica has computed."""
        self._handovers.relay(replica, piece)

    def settle(self, replica: str) -> None:
        """The replica is lost, with all that it had not answered."""
        self._handovers.lose(replica)
        for sent in list(self._sent.values()):
            if sent.replica == replica:
                self._lose(sent, None)

    def lose_prompts(self, replica: str) -> None:
        """The replica's engine is not there: what it had to hand over does not come."""
        self._handovers.lose(replica)

    def forget(self, replica: str) -> None:
        """The replica has left the fleet."""
        self._handovers.counts.forget(replica)

    def note_ready(self) -> None:
        """A replica has become ready: send what waits for one."""
        for sent in list(self._sent.values()):
            if sent.replica is None:
                sent.left_out.clear()
                self._send_or_wait(sent)

    def note_crash(self, crash: EngineCrashed) -> None:
        """An engine of the fleet has crashed."""
        self._quarantine.note_crash(crash)
        for key in filter(self._quarantine.holds, crash.adapters):
            self._end_everywhere(key)

    # --- one request ------------------------------------------------------------------------------

    def _as_routed(self, request: GenerationRequest) -> RoutedRequest:
        return RoutedRequest(
            request_id=request.request_id,
            adapter=None if request.adapter is None else adapter_name(request.adapter),
            group_id=request.group_id,
            block_hashes=prefix_hashes(request),
        )

    def _is_proven(self, request: GenerationRequest) -> bool:
        return request.adapter is None or self._quarantine.is_proven(request.adapter)

    def _end_everywhere(self, key: AdapterKey) -> None:
        """End the requests for an adapter that is in quarantine now, before they end more."""
        for sent in list(self._sent.values()):
            if sent.stream.request.uses(key):
                self._send_abort(sent.stream)
                self._streams.end(sent.stream, AdapterQuarantined())

    def _is_at(self, request_id: str, replica: str) -> bool:
        sent = self._sent.get(request_id)
        return sent is not None and sent.replica == replica

    def _send(self, sent: _Sent) -> None:
        """Send it to the replica that the router chooses. Raises NoReplicaReady."""
        request = as_left(sent.stream)
        num_lone_steps = self._quarantine.num_lone_steps(request)
        if num_lone_steps > request.num_lone_steps:
            request = replace(request, num_lone_steps=num_lone_steps)
        is_confined = num_lone_steps > 0 or not self._is_proven(request)
        sent.routed = replace(sent.routed, is_confined=is_confined)
        while True:
            name = self._router.choose(sent.routed, leave_out=sent.left_out)
            source = None
            if not sent.left_out:  # a request that was refused or lost goes the short way
                source = self._handovers.source_for(request, sent.routed, name)
            if self._send_to(name, Submit(replace(request, awaits_prefix=source is not None))):
                break
            sent.left_out.add(name)
        self._router.open(sent.routed, name)
        sent.replica = name
        if source is not None:
            self._handovers.begin(request, source, name)
            if request.adapter is not None:  # while the prompt is computed elsewhere
                self._send_to(name, Prefetch(request.adapter))
        sent.stream.num_submissions += 1

    def _finish(self, end: RequestFinished) -> None:
        sent = self._sent[end.request_id]
        is_over = end.error is None or sent.stream.is_started or sent.stream.is_aborted
        code = None if is_over or end.error is None else end.error.code
        # A confined request runs on no other replica because its own has a full queue.
        if code in REFUSALS and not (code == NotNow.code and sent.routed.is_confined):
            self._send_elsewhere(sent, end)
        elif code == EngineRestarted.code:
            self._lose(sent, end)
        else:
            self._streams.finish(end)

    def _send_elsewhere(self, sent: _Sent, refusal: RequestFinished) -> None:
        """Send what a replica refused to another one; if there is none, the refusal stands."""
        self._leave(sent)
        try:
            self._send(sent)
        except NoReplicaReady:
            self._streams.finish(refusal)

    def _lose(self, sent: _Sent, end: RequestFinished | None) -> None:
        """A replica was lost with this request. `end`: what it said of it."""
        self._leave(sent)
        sent.num_losses += 1
        stream = sent.stream
        objection = self._quarantine.objection(stream.request)
        if objection or stream.is_started or stream.is_aborted or sent.num_losses > MAX_LOSSES:
            self._streams.end(stream, objection or EngineRestarted())
        else:
            self._send_or_wait(sent)

    def _send_or_wait(self, sent: _Sent) -> None:
        try:
            self._send(sent)
        except NoReplicaReady:
            if sent.waiting is None:
                sent.waiting = asyncio.get_running_loop().call_later(
                    MAX_WAIT_SECONDS, self._streams.end, sent.stream, EngineRestarted()
                )
        else:
            if sent.waiting is not None:
                sent.waiting.cancel()
                sent.waiting = None

    def _leave(self, sent: _Sent) -> None:
        """The request is at no replica now."""
        assert sent.replica is not None
        self._handovers.drop(sent.stream.request.request_id)
        self._router.close(sent.stream.request.request_id)
        sent.left_out.add(sent.replica)
        sent.replica = None

    def _abort(self, stream: RequestStream) -> None:
        if not self._send_abort(stream):
            self._streams.end(stream, EngineRestarted())

    def _send_abort(self, stream: RequestStream) -> bool:
        sent = self._sent.get(stream.request.request_id)
        if sent is None or sent.replica is None:
            return False
        return self._send_to(sent.replica, Abort(stream.request.request_id))

    def _note_end(self, stream: RequestStream, end: RequestFinished) -> None:
        self._quarantine.note_end(stream.request, end)
        sent = self._sent.pop(stream.request.request_id)
        self._handovers.drop(stream.request.request_id)
        if sent.waiting is not None:
            sent.waiting.cancel()
        if sent.replica is not None:
            self._router.close(stream.request.request_id)


def _call_later(seconds: float, action: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, action)
