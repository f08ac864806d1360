"""Requests whose prompt one replica computes for another one, which decodes.

The request itself is an ordinary one of the replica that decodes: it waits there for the pages of
its prefix, and computes what does not come. So whatever is lost on the way costs time and nothing
else, and only that replica's tokens are counted.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from ..messages import (
    NO_RESOURCES,
    Abort,
    FinishReason,
    GenerationRequest,
    PrefixPiece,
    PrefixTransport,
    RequestFinished,
    RequestStarted,
    Resources,
    StepEvents,
    Submit,
    ToAgent,
)
from ..sampling_params import SamplingParams
from .handover_counts import HandoverCounts
from .handover_pace import HandoverPace
from .router import RoutedRequest, Router

PREFILL_SUFFIX = "/prefill"

MIN_TOKENS = 512
"""A shorter prompt delays other requests by less than a handover costs."""
PATIENCE = 4.0
"""A request waits for its prefix for this multiple of the time that computing it takes, as far as
handovers have shown. After that it has lost more than computing the prompt itself would cost."""
LEAST_PATIENCE_SECONDS = 1.0
"""The load of an adapter and other prompts of the prefill replica come before the computation."""
FIRST_PATIENCE_SECONDS = 30.0
"""While no handover has shown what a token takes."""

_log = logging.getLogger(__name__)


class Timer(Protocol):
    """What has to happen later."""

    def cancel(self) -> None:
        """It does not happen."""


@dataclass(slots=True)
class _Handover:
    """One prompt on its way."""

    request_id: str
    source: str
    target: str
    num_tokens: int
    transport: PrefixTransport
    begun_at: float
    computed_at: float | None = None
    num_cached_tokens: int | None = None
    """What the source found in its prefix cache."""
    used: Resources = NO_RESOURCES
    """What the source spent on the prompt."""
    is_over: bool = False
    """The target waits no longer."""
    is_complete: bool = False
    """Its last piece was passed on."""
    timer: Timer | None = None
    """Ends the patience of the target."""

    @property
    def prefill_id(self) -> str:
        return self.request_id + PREFILL_SUFFIX


class Handovers:
    """Has prompts computed, and passes their prefixes on."""

    def __init__(
        self,
        router: Router,
        send: Callable[[str, ToAgent], bool],
        has_room: Callable[[str], bool],
        clock: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], Timer],
        share_memory: Callable[[str, str], bool],
    ) -> None:
        """`send` sends to the replica of this name; False if it cannot. `has_room`: whether it has
        read most of what was sent to it. `call_later`: after seconds of `clock`. `share_memory`:
        whether the engines of two replicas may."""
        self._router = router
        self._send = send
        self._has_room = has_room
        self._clock = clock
        self._call_later = call_later
        self._share_memory = share_memory
        self._paces: defaultdict[tuple[str, str], HandoverPace]
        self._paces = defaultdict(partial(HandoverPace, clock))
        """By source and target."""
        self.counts = HandoverCounts(clock)
        self._of: dict[str, _Handover] = {}
        """By request."""
        self._prefills: dict[str, _Handover] = {}
        """Those that are not over, by the request that computes the prompt."""

    def source_for(
        self, request: GenerationRequest, routed: RoutedRequest, target: str
    ) -> str | None:
        """The replica that is to compute the prompt for the target; None: the target itself."""
        if not _may_hand_over(request) or routed.is_confined:
            return None
        if self._router.knows_prefix(routed):
            return None
        slow = {
            source for (source, to), pace in self._paces.items() if to == target and not pace.pays()
        }
        return self._router.choose_prefill(routed, target, leave_out=slow)

    def begin(self, request: GenerationRequest, source: str, target: str) -> None:
        """The request was sent to the target, which waits for the prefix."""
        handover = _Handover(
            request.request_id,
            source,
            target,
            len(request.prompt_token_ids),
            self._transport(source, target),
            begun_at=self._clock(),
        )
        self._of[request.request_id] = handover
        prefill = replace(
            request,
            request_id=handover.prefill_id,
            sampling=SamplingParams(max_tokens=0),
            exports_prefix=True,
            prefix_transport=handover.transport,
            decoded_length=request.greatest_length,
            awaits_prefix=False,
            speculation=None,
        )
        if not self._send(source, Submit(prefill)):
            self._give_up(handover)
            return
        self._prefills[handover.prefill_id] = handover
        adapter = self._router.adapter_of(request.request_id)
        self._router.open(RoutedRequest(handover.prefill_id, adapter), source)
        patience = self._patience(handover.num_tokens)
        handover.timer = self._call_later(patience, partial(self._give_up_late, handover))

    def note(self, replica: str, events: StepEvents) -> None:
        """Take what a replica says of the requests that compute prompts and of those that
        waited."""
        for started in events.started:
            if handover := self._computed_by(replica, started.request_id):
                handover.num_cached_tokens = started.num_cached_tokens
            elif (handover := self._of.get(started.request_id)) and handover.target == replica:
                self._note_pace(handover, started)
        for finished in events.finished:
            if handover := self._computed_by(replica, finished.request_id):
                handover.used += finished.used
            if handover := self._find(replica, finished.request_id):
                if finished.reason is FinishReason.LENGTH:
                    handover.computed_at = self._clock()
                else:
                    self._give_up(handover)

    def relay(self, source: str, piece: PrefixPiece) -> None:
        """Pass a piece on; if the target does not keep up, it computes the rest itself."""
        handover = self._find(source, piece.request_id)
        if handover is None:
            return
        if not self._has_room(handover.target):
            self._give_up(handover)
            return
        self._send(handover.target, replace(piece, request_id=handover.request_id))
        self.counts.add_bytes(source, handover.target, piece.num_bytes)
        if piece.is_last:
            handover.is_complete = bool(piece.groups)
            note = self.counts.complete if piece.groups else self.counts.give_up
            note(source, handover.target)
            self._end(handover)

    def lose(self, replica: str) -> None:
        """A replica or its engine was lost, with what it computed."""
        for pair in [pair for pair in self._paces if replica in pair]:
            del self._paces[pair]
        for handover in list(self._prefills.values()):
            if handover.source == replica:
                self._give_up(handover)

    def drop(self, request_id: str) -> None:
        """The request has ended, or left its replica."""
        handover = self._of.pop(request_id, None)
        if handover is not None and not handover.is_over:
            self._end(handover)
            self._send(handover.source, Abort(handover.prefill_id))

    def as_cached(self, started: RequestStarted) -> RequestStarted:
        """What was cached of a prompt when it was computed: a handed-over prefix was not."""
        handover = self._of.get(started.request_id)
        if handover is None:
            return started
        num_cached = min(started.num_cached_tokens, handover.num_cached_tokens or 0)
        return replace(started, num_cached_tokens=num_cached)

    def with_prefill(self, end: RequestFinished) -> RequestFinished:
        """The end of a request with what the source has spent on its prompt too."""
        handover = self._of.get(end.request_id)
        return end if handover is None else replace(end, used=end.used + handover.used)

    def _computed_by(self, source: str, prefill_id: str) -> _Handover | None:
        """The handover whose prompt this replica computes or has computed: an agent may pass its
        last piece on before the events of the same step."""
        handover = self._of.get(prefill_id.removesuffix(PREFILL_SUFFIX))
        if handover is None or (handover.prefill_id, handover.source) != (prefill_id, source):
            return None
        return handover

    def _find(self, source: str, prefill_id: str) -> _Handover | None:
        """The handover that is not over and that this replica computes."""
        handover = self._prefills.get(prefill_id)
        return handover if handover and handover.source == source else None

    def _transport(self, source: str, target: str) -> PrefixTransport:
        may_share = self._paces[source, target].shares_memory()
        if may_share and self._share_memory(source, target):
            return PrefixTransport.MEMORY
        return PrefixTransport.FRAMES

    def _patience(self, num_tokens: int) -> float:
        """The seconds after which a prompt is better computed where it is decoded."""
        known = [pace.token_seconds for pace in self._paces.values()]
        fastest = min((each for each in known if each is not None), default=None)
        if fastest is None:
            return FIRST_PATIENCE_SECONDS
        return max(PATIENCE * fastest * num_tokens, LEAST_PATIENCE_SECONDS)

    def _note_pace(self, handover: _Handover, started: RequestStarted) -> None:
        """The target has admitted the request, so it knows how long it waited for the prefix."""
        if handover.is_complete and handover.computed_at is not None:
            pace = self._paces[handover.source, handover.target]
            if handover.transport is PrefixTransport.MEMORY and not started.num_cached_tokens:
                pace.note_unread()
            computed = handover.computed_at - handover.begun_at
            pace.note(
                handover.num_tokens - (handover.num_cached_tokens or 0),
                computed=computed,
                passed_on=max(started.prefix_wait_seconds - computed, 0.0),
            )

    def _give_up_late(self, handover: _Handover) -> None:
        _log.warning("handover_late", extra={"replica_id": handover.source, "to": handover.target})
        self._paces[handover.source, handover.target].note_late()
        self._give_up(handover)

    def _give_up(self, handover: _Handover) -> None:
        """The target goes on with what it has, and the source sends no more."""
        self._end(handover)
        self.counts.give_up(handover.source, handover.target)
        self._send(handover.source, Abort(handover.prefill_id))
        self._send(handover.target, PrefixPiece(handover.request_id, [], is_last=True))

    def _end(self, handover: _Handover) -> None:
        handover.is_over = True
        if handover.timer is not None:
            handover.timer.cancel()
        if self._prefills.pop(handover.prefill_id, None):
            self._router.close(handover.prefill_id)


def _may_hand_over(request: GenerationRequest) -> bool:
    """Whether what the request needs of its prompt is its cached prefix alone."""
    return (
        len(request.prompt_token_ids) >= MIN_TOKENS
        and request.sampling.max_tokens > 1
        and request.group_id is None
        and request.kv_policy is None
        and request.pooling is None
        and request.num_prompt_logprobs is None
        and not request.is_background
        and not request.return_logits
    )
