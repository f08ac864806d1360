"""Requests whose prompt one replica computes for another one, which decodes.

The request itself is an ordinary one of the replica that decodes: it waits there for the pages of
its prefix, and computes what does not come. So whatever is lost on the way costs time and nothing
else, and only that replica's tokens are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..messages import (
    NO_RESOURCES,
    Abort,
    FinishReason,
    GenerationRequest,
    PrefixPiece,
    RequestFinished,
    RequestStarted,
    Resources,
    StepEvents,
    Submit,
    ToAgent,
)
from ..sampling_params import SamplingParams
from .handover_pace import HandoverPace
from .router import RoutedRequest, Router

PREFILL_SUFFIX = "/prefill"

MIN_TOKENS = 512
"""A shorter prompt delays other requests by less than a handover costs."""


@dataclass(slots=True)
class _Handover:
    """One prompt on its way."""

    request_id: str
    source: str
    target: str
    num_tokens: int
    begun_at: float
    computed_at: float | None = None
    num_cached_tokens: int | None = None
    """What the source found in its prefix cache."""
    used: Resources = NO_RESOURCES
    """What the source spent on the prompt."""
    is_over: bool = False
    """The target waits no longer."""

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
    ) -> None:
        """`send` sends to the replica of this name; False if it cannot. `has_room`: whether it has
        read most of what was sent to it."""
        self._router = router
        self._send = send
        self._has_room = has_room
        self._clock = clock
        self._pace = HandoverPace(clock)
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
        if self._router.knows_prefix(routed) or not self._pace.pays():
            return None
        return self._router.choose_prefill(routed, target)

    def begin(self, request: GenerationRequest, source: str, target: str) -> None:
        """The request was sent to the target, which waits for the prefix."""
        handover = _Handover(
            request.request_id, source, target, len(request.prompt_token_ids), self._clock()
        )
        self._of[request.request_id] = handover
        prefill = replace(
            request,
            request_id=handover.prefill_id,
            sampling=SamplingParams(max_tokens=0),
            exports_prefix=True,
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

    def note(self, source: str, events: StepEvents) -> None:
        """Take what the source says of the requests that compute prompts."""
        for started in events.started:
            if handover := self._find(source, started.request_id):
                handover.num_cached_tokens = started.num_cached_tokens
        for finished in events.finished:
            request_id = finished.request_id.removesuffix(PREFILL_SUFFIX)
            if request_id != finished.request_id and request_id in self._of:
                self._of[request_id].used += finished.used
            if handover := self._find(source, finished.request_id):
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
        if piece.is_last:
            self._end(handover)
            if handover.computed_at is not None and piece.groups:
                self._pace.note(
                    computed=handover.computed_at - handover.begun_at,
                    passed_on=self._clock() - handover.computed_at,
                )

    def lose(self, replica: str) -> None:
        """A replica or its engine was lost, with what it computed."""
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

    def _find(self, source: str, prefill_id: str) -> _Handover | None:
        """The handover that is not over and that this replica computes."""
        handover = self._prefills.get(prefill_id)
        return handover if handover and handover.source == source else None

    def _give_up(self, handover: _Handover) -> None:
        """The target goes on with what it has, and the source sends no more."""
        self._end(handover)
        self._send(handover.source, Abort(handover.prefill_id))
        self._send(handover.target, PrefixPiece(handover.request_id, [], is_last=True))

    def _end(self, handover: _Handover) -> None:
        handover.is_over = True
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
