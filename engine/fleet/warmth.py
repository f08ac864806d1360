"""Loads adapters where their next requests go: on a replica that joins, before it gets requests,
and on the heirs of one that leaves."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...adapters.identity import AdapterKey
from ...adapters.status import AdapterStatus
from ...adapters.tier import Tier
from ..messages import Prefetch, ReplicaState
from .adapter_name import adapter_name
from .rendezvous import RendezvousOrder
from .replica_link import ReplicaLink
from .warm_targets import WarmTargets

WARM_SECONDS = 30.0
"""Maximum time for which a replica that joins gets no requests."""
MAX_WARM_PART = 0.8
"""Of the arena: the rest is for what is asked for meanwhile."""


@dataclass(frozen=True, slots=True)
class _Warming:
    wanted: frozenset[str]
    ends_at: float


class Warmth:
    """Knows how many replicas each adapter needs, and which replicas are not warm yet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._targets: WarmTargets | None = None
        self._warming: dict[str, _Warming] = {}

    def look(self, links: Sequence[ReplicaLink]) -> None:
        """Take what runs now; to be called every second or so."""
        batches = [link.info.max_num_seqs for link in links if link.info]
        if not batches:
            return
        # An adapter's leases are the requests that run it: its traffic in parts of a batch.
        self._targets = self._targets or WarmTargets(max(1, min(batches)))
        leases: Counter[str] = Counter()
        for link in links:
            for status in _statuses(link):
                if status.num_leases:
                    leases[adapter_name(status.key)] += status.num_leases
        traffic = {name: float(number) for name, number in leases.items()}
        self._targets.update(traffic, self._clock())

    def begin(self, link: ReplicaLink, links: Sequence[ReplicaLink]) -> None:
        """The replica joins: have it load what it will be asked for, if others serve meanwhile."""
        others = [each for each in links if each is not link and _serves(each)]
        self._warming.pop(link.id, None)
        if not others or link.info is None:
            return
        order = RendezvousOrder(each.id for each in [link, *others])
        room = MAX_WARM_PART * link.info.arena_bytes
        wanted: list[AdapterKey] = []
        for status in _resident(others):
            name = adapter_name(status.key)
            if link.id in order.of(name)[: self._num_replicas(name)]:
                room -= status.device_bytes
                if room < 0:
                    break
                wanted.append(status.key)
        for key in wanted:
            link.send(Prefetch(key))
        if wanted:
            names = frozenset(map(adapter_name, wanted))
            self._warming[link.id] = _Warming(names, self._clock() + WARM_SECONDS)

    def is_warm(self, link: ReplicaLink) -> bool:
        """Whether the replica may get requests: it has loaded what it should, or had its time."""
        warming = self._warming.get(link.id)
        if warming is None:
            return True
        loaded = {adapter_name(status.key) for status in _resident([link])}
        if not warming.wanted <= loaded and self._clock() < warming.ends_at:
            return False
        del self._warming[link.id]
        return True

    def bequeath(self, link: ReplicaLink, links: Sequence[ReplicaLink]) -> None:
        """The replica leaves: have the next ones of each adapter's order load what it had."""
        heirs = {each.id: each for each in links if each is not link and _serves(each)}
        order = RendezvousOrder(heirs)
        held = {name: {status.key for status in _resident([heirs[name]])} for name in heirs}
        for status in _resident([link]):
            name = adapter_name(status.key)
            for heir in order.of(name)[: self._num_replicas(name)]:
                if status.key not in held[heir]:
                    heirs[heir].send(Prefetch(status.key))

    def _num_replicas(self, name: str) -> int:
        return max(1, self._targets.of(name) if self._targets else 0)


def _serves(link: ReplicaLink) -> bool:
    return link.state is ReplicaState.READY and not link.member.is_draining


def _statuses(link: ReplicaLink) -> Sequence[AdapterStatus]:
    return link.stats.adapters if link.stats is not None else ()


def _resident(links: Sequence[ReplicaLink]) -> Iterator[AdapterStatus]:
    """On their devices: leased ones first within each replica, then by last use."""
    seen: set[AdapterKey] = set()
    for link in links:
        for status in _statuses(link):
            if status.tier is Tier.DEVICE and status.key not in seen:
                seen.add(status.key)
                yield status
