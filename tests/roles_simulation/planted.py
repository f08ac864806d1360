"""Mistakes in handovers that the simulation must catch: one wrong piece of the real code each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

from loraplex.engine.fleet.handovers import Handovers
from loraplex.engine.handover.prefix_handover import PrefixHandover
from loraplex.engine.messages import GenerationRequest, PrefixPiece, RequestStarted
from loraplex.engine.request import Request
from simulation.violation import Invariant

from .engine import ReplicaEngine
from .world import run_seed

NUM_SEEDS = 40
NUM_ROUNDS = 300

_store = PrefixHandover.store
_export = PrefixHandover.export
_read = PrefixHandover._read
_relay = Handovers.relay
_take_prefix = ReplicaEngine.take_prefix


def _store_for_the_base(self: PrefixHandover, request: Request, piece: PrefixPiece) -> None:
    """The prompt is the same."""
    namespace = request.namespace
    request.namespace = replace(namespace, adapter=None)
    _store(self, request, piece)
    request.namespace = namespace


def _read_the_next(self: PrefixHandover, group: int, found: dict[int, int], start: int) -> Any:
    """The first block needs no copy."""
    indices = list(found)
    shifted = {index: found[after] for index, after in pairwise(indices)}
    return _read(self, group, {**found, **shifted}, start)


def _relay_what_fits(self: Handovers, source: str, piece: PrefixPiece) -> None:
    """Only what does not fit is missing."""
    handover = self._find(source, piece.request_id)
    if handover is None or self._has_room(handover.target):
        _relay(self, source, piece)


def _as_found(self: Handovers, started: RequestStarted) -> RequestStarted:
    """The target found them in its cache."""
    return started


def _take_late(self: ReplicaEngine, piece: PrefixPiece) -> None:
    """Somebody will ask for it again."""
    requests: dict[str, Request] = self.__dict__.setdefault("_kept", {})
    for name in self.awaiting:
        request = self.scheduler.get(name)
        assert request is not None
        requests[name] = request
    if piece.request_id in self.awaiting:
        _take_prefix(self, piece)
    elif piece.groups and piece.request_id in requests:
        self.handover.store(requests[piece.request_id], piece)


def _export_all(self: PrefixHandover, request: Request, *, is_deleted: bool) -> None:
    """The request may end, so its prefix may go."""
    _export(self, request, is_deleted=False)


def _own_length(self: GenerationRequest) -> int:
    """A prompt is computed alike, whatever follows it."""
    return len(self.prompt_token_ids) + self.sampling.max_tokens


def _nothing(*_: object) -> None:
    """It ends by itself."""


def _plant(
    owner: type, attribute: str, mistaken: object
) -> Callable[[], AbstractContextManager[object]]:
    return partial(mock.patch.object, owner, attribute, mistaken)


MISTAKES: Mapping[str, tuple[Callable[[], AbstractContextManager[object]], Invariant]] = {
    "stores_under_another_namespace": (
        _plant(PrefixHandover, "store", _store_for_the_base),
        Invariant.OWN_CONTENT,
    ),
    "sends_the_wrong_blocks": (
        _plant(PrefixHandover, "_read", _read_the_next),
        Invariant.OWN_CONTENT,
    ),
    "sends_what_was_deleted": (
        _plant(PrefixHandover, "forget", _nothing),
        Invariant.HANDED_OVER,
    ),
    "sends_what_ends_after_the_deletion": (
        _plant(PrefixHandover, "export", _export_all),
        Invariant.HANDED_OVER,
    ),
    "computes_for_another_length": (
        _plant(GenerationRequest, "greatest_length", property(_own_length)),
        Invariant.OWN_CONTENT,
    ),
    "keeps_what_comes_after_the_deletion": (
        _plant(ReplicaEngine, "take_prefix", _take_late),
        Invariant.HANDED_OVER,
    ),
    "waits_for_a_dead_replica": (_plant(Handovers, "lose", _nothing), Invariant.PROGRESS),
    "drops_the_last_piece": (_plant(Handovers, "relay", _relay_what_fits), Invariant.PROGRESS),
    "computes_for_who_has_left": (_plant(Handovers, "drop", _nothing), Invariant.QUIESCENT),
    "bills_what_came_as_cached": (_plant(Handovers, "as_cached", _as_found), Invariant.BILLED),
}
"""Each mistake, and the invariant that it breaks."""

LIKELY_SEEDS = {
    "stores_under_another_namespace": 13,
    "sends_the_wrong_blocks": 1,
    "sends_what_was_deleted": 28,
    "sends_what_ends_after_the_deletion": 16,
    "keeps_what_comes_after_the_deletion": 21,
    "waits_for_a_dead_replica": 4,
    "drops_the_last_piece": 23,
}
"""Which is tried first."""


def caught_by(name: str) -> str | None:
    """What was seen of it; None if nothing was."""
    plant, _ = MISTAKES[name]
    with plant():
        likely = [LIKELY_SEEDS[name]] if name in LIKELY_SEEDS else []
        for seed in (*likely, *range(NUM_SEEDS)):
            if violation := run_seed(seed, NUM_ROUNDS).violation:
                return f"seed {seed}: {violation}"
    return None
