"""Chooses a replica for each request.

Every API server has a router of its own, fed from its connections to the replicas. The rules are
those of decision 71. The choice depends on the router's state and the request only, so it needs
neither a clock nor random numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from .errors import NoReplicaReady
from .prefix_homes import PrefixHomes
from .rendezvous import RendezvousOrder
from .replica_state import ReplicaRole, ReplicaState, ReplicaStats

BASE = ""
"""Has an order of its own, for the suspects without an adapter."""


class Bound(NamedTuple):
    """The load from which a replica is passed over."""

    batch_share: float
    """What does not fit into a replica's batch waits until a request ends."""
    relative_load: float
    """The least bound, relative to the mean: where every batch is full, a queue costs less than
    the loads that spreading the requests causes."""

    def load(self, mean: float, max_batch: int) -> float:
        """`mean`: requests per replica; `max_batch`: as in ReplicaStats."""
        return max(self.batch_share * max_batch, self.relative_load * mean)


PREFERRED = Bound(batch_share=0.75, relative_load=1.0)
"""For the home of a prefix, and for the replica of the order that loads the adapter. The rest of
the batch is for requests of other servers that came after the last report, and for residents of the
replica that get busy."""
RESIDENT = Bound(batch_share=1.25, relative_load=1.75)
"""For replicas that have the adapter. A quarter of a batch waits about as long as a load takes (on
an H100: 0.66 and 0.74 s), and another load delays all that wait for it."""


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What the choice of a replica depends on."""

    request_id: str
    adapter: str | None
    """None: the base."""
    group_id: str | None = None
    """The answers of `n > 1`, or the probes of one attestation: all run on one replica."""
    block_hashes: Sequence[bytes] = ()
    """Of the prompt's first full blocks, as in PrefixHomes."""
    is_confined: bool = False
    """It may end its engine: a crash may be due to its adapter or its prompt, or its adapter is
    unproven. Such requests must not end several engines."""


@dataclass(slots=True)
class _Replica:
    name: str
    state: ReplicaState = ReplicaState.REFUSING
    role: ReplicaRole = ReplicaRole.BOTH
    num_own: int = 0
    """Requests that this server has open there."""
    num_others: int = 0
    """Requests of other servers, when the replica last reported."""
    max_batch: int = 0
    residents: set[str] = field(default_factory=set)
    keeps_prefixes: bool = False
    """Whether a restart of its engine finds them on its disk."""

    @property
    def load(self) -> int:
        return self.num_own + self.num_others


@dataclass(slots=True)
class _Group:
    replica: str
    num_open: int


class Router:
    """Knows the replicas' states and loads, and the requests that this server has open."""

    def __init__(self, order: RendezvousOrder) -> None:
        """The router keeps the order's replicas; several routers may share an order."""
        self._order = order
        self._replicas: dict[str, _Replica] = {}
        self._ready: list[_Replica] = []
        """Those that take requests, by name."""
        self._ready_names: set[str] = set()
        self._prefilling: list[_Replica] = []
        """Those that compute prompts for them."""
        self._total_load = 0  # of the ready ones: summed anew for each request it would cost most
        self._groups: dict[str, _Group] = {}
        self._prefixes = PrefixHomes()
        self._open: dict[str, tuple[RoutedRequest, str]] = {}

    def set_state(
        self, name: str, state: ReplicaState, role: ReplicaRole = ReplicaRole.BOTH
    ) -> None:
        """Takes effect with the next choice. An unknown replica is added."""
        replica = self._replicas.setdefault(name, _Replica(name))
        replica.state, replica.role = state, role
        if state is ReplicaState.GONE:
            self._order.remove(name)
        else:
            self._order.add(name)
        if state in (ReplicaState.REFUSING, ReplicaState.GONE):
            replica.residents.clear()
            replica.num_others = 0
            if state is ReplicaState.GONE or not replica.keeps_prefixes:
                self._prefixes.forget(name)
        if state is ReplicaState.GONE and not replica.num_own:
            del self._replicas[name]
        ready = sorted(
            (each for each in self._replicas.values() if each.state is ReplicaState.READY),
            key=lambda each: each.name,
        )
        # Those that compute prompts for others take whole requests if there are no others.
        self._ready = [each for each in ready if each.role is not ReplicaRole.PREFILL] or ready
        self._ready_names = {each.name for each in self._ready}
        self._prefilling = [each for each in ready if each not in self._ready]
        self._total_load = sum(each.load for each in self._ready)

    def report(self, name: str, stats: ReplicaStats) -> None:
        """Takes a replica's statistics. What this server has open there is counted once."""
        replica = self._replicas[name]
        before = replica.load
        replica.num_others = max(0, stats.num_requests - replica.num_own)
        replica.max_batch = stats.max_batch
        replica.residents = set(stats.residents)
        replica.keeps_prefixes = stats.keeps_prefixes
        if name in self._ready_names:
            self._total_load += replica.load - before

    def choose(self, request: RoutedRequest, *, leave_out: Collection[str] = ()) -> str:
        """The name of a ready replica outside of `leave_out`, which names those that refused.

        For a confined request it is the first of the order, at any load: all API servers send the
        confined requests of one adapter to one replica. Raises NoReplicaReady.
        """
        candidates: Sequence[_Replica] = self._ready
        total_load = self._total_load
        if leave_out:
            candidates = [each for each in candidates if each.name not in leave_out]
            total_load = sum(each.load for each in candidates)
        if not candidates:
            raise NoReplicaReady
        if request.is_confined:
            return next(self._in_order(request.adapter or BASE, leave_out)).name
        home = self._home_of_group(request, leave_out)
        if home is not None:
            return home.name
        if request.adapter is None:
            return _less_loaded_of_two(candidates, request.request_id).name
        # With this request, the mean is above the least load, so some replica has room.
        mean = (total_load + 1) / len(candidates)
        return self._choose_for_adapter(request, request.adapter, mean, leave_out).name

    def knows_prefix(self, request: RoutedRequest) -> bool:
        """Whether some replica has computed the first blocks of the prompt."""
        return self._prefixes.find(request.block_hashes) is not None

    def choose_prefill(
        self, request: RoutedRequest, target: str, *, leave_out: Collection[str] = ()
    ) -> str | None:
        """The replica outside of `leave_out` that is to compute the prompt for `target`; None: the
        target itself.

        An idle target, which delays nobody, computes it. Otherwise it is the first of the order
        that has room, so that an adapter is loaded by few of them.
        """
        replica = self._replicas[target]
        if replica.role is not ReplicaRole.DECODE or not replica.load:
            return None
        rank = {name: place for place, name in enumerate(self._order.of(request.adapter or BASE))}
        open_ones = [
            each
            for each in self._prefilling
            if each.name not in leave_out
            if not each.load or each.load < PREFERRED.load(0.0, each.max_batch)
        ]
        first = min(open_ones, key=lambda each: rank[each.name], default=None)
        return None if first is None else first.name

    def adapter_of(self, request_id: str) -> str | None:
        """That of an open request; None: the base."""
        return self._open[request_id][0].adapter

    def open(self, request: RoutedRequest, name: str) -> None:
        """The request was sent to the replica."""
        replica = self._replicas[name]
        self._open[request.request_id] = request, name
        self._count_own(replica, 1)
        if request.adapter is not None:
            replica.residents.add(request.adapter)
            self._prefixes.record(request.block_hashes, name)
        if request.group_id is not None:
            group = self._groups.get(request.group_id)
            num_open = group.num_open if group else 0
            self._groups[request.group_id] = _Group(name, num_open + 1)

    def close(self, request_id: str) -> None:
        """The request ended there, or the replica refused it."""
        request, name = self._open.pop(request_id)
        replica = self._replicas[name]
        self._count_own(replica, -1)
        if replica.state is ReplicaState.GONE and not replica.num_own:
            del self._replicas[name]
        if request.group_id is not None:
            group = self._groups[request.group_id]
            group.num_open -= 1
            if not group.num_open:
                del self._groups[request.group_id]

    def _count_own(self, replica: _Replica, change: int) -> None:
        replica.num_own += change
        if replica.name in self._ready_names:
            self._total_load += change

    def _home_of_group(self, request: RoutedRequest, leave_out: Collection[str]) -> _Replica | None:
        if request.group_id is None or request.group_id not in self._groups:
            return None
        return self._ready_replica(self._groups[request.group_id].replica, leave_out)

    def _choose_for_adapter(
        self,
        request: RoutedRequest,
        adapter: str,
        mean: float,
        leave_out: Collection[str],
    ) -> _Replica:
        home = self._ready_replica(self._prefixes.find(request.block_hashes), leave_out)
        if home is not None and adapter in home.residents and _has_room(home, mean, PREFERRED):
            return home
        in_order = list(self._in_order(adapter, leave_out))
        residents = [each for each in in_order if adapter in each.residents]
        if residents:
            least = min(residents, key=lambda each: each.load)  # of equal ones, the first
            if _has_room(least, mean, RESIDENT):
                return least
        return next(each for each in in_order if _has_room(each, mean, PREFERRED))

    def _in_order(self, adapter: str, leave_out: Collection[str]) -> Iterator[_Replica]:
        for name in self._order.of(adapter):
            replica = self._ready_replica(name, leave_out)
            if replica is not None:
                yield replica

    def _ready_replica(self, name: str | None, leave_out: Collection[str]) -> _Replica | None:
        if name is None or name in leave_out:
            return None
        replica = self._replicas.get(name)
        return replica if replica and name in self._ready_names else None


def _has_room(replica: _Replica, mean: float, bound: Bound) -> bool:
    return replica.load < bound.load(mean, replica.max_batch)


def _less_loaded_of_two(candidates: Sequence[_Replica], request_id: str) -> _Replica:
    digest = blake2b(request_id.encode(), digest_size=16).digest()
    first = candidates[int.from_bytes(digest[:8]) % len(candidates)]
    second = candidates[int.from_bytes(digest[8:]) % len(candidates)]
    return first if first.load <= second.load else second
