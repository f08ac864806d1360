"""The policies that are compared with ours.

All of them see the same states and statistics, and count their own open requests as ours does.
Requests for the base go by two choices where a policy needs an adapter. Hashing uses the
rendezvous order, which spreads a lost replica's adapters over all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import Protocol

from loraplex.engine.fleet.errors import NoReplicaReady
from loraplex.engine.fleet.rendezvous import RendezvousOrder
from loraplex.engine.fleet.replica_state import ReplicaState, ReplicaStats
from loraplex.engine.fleet.router import RoutedRequest, Router


class Policy(Protocol):
    """What the simulation calls of a router."""

    def set_state(self, name: str, state: ReplicaState) -> None: ...
    def report(self, name: str, stats: ReplicaStats) -> None: ...
    def choose(self, request: RoutedRequest, *, leave_out: Collection[str] = ()) -> str: ...
    def open(self, request: RoutedRequest, name: str) -> None: ...
    def close(self, request_id: str) -> None: ...


class View:
    """States, loads and residents, as one router knows them."""

    def __init__(self, order: RendezvousOrder, random: Random) -> None:
        self.order, self.random = order, random
        self.num_chosen = random.randrange(1000)
        self.ready: list[str] = []
        self.load: Counter[str] = Counter()
        self.residents: dict[str, set[str]] = {}
        self._own: Counter[str] = Counter()
        self._open: dict[str, str] = {}

    def set_state(self, name: str, state: ReplicaState) -> None:
        self.order.add(name)
        self.residents.setdefault(name, set())
        ready = set(self.ready) - {name}
        self.ready = sorted(ready | ({name} if state is ReplicaState.READY else set()))

    def report(self, name: str, stats: ReplicaStats) -> None:
        self.load[name] = max(stats.num_requests, self._own[name])
        self.residents[name] = set(stats.residents)

    def open(self, request: RoutedRequest, name: str) -> None:
        self._open[request.request_id] = name
        self._own[name] += 1
        self.load[name] += 1
        if request.adapter is not None:
            self.residents[name].add(request.adapter)

    def close(self, request_id: str) -> None:
        name = self._open.pop(request_id)
        self._own[name] -= 1
        self.load[name] = max(0, self.load[name] - 1)

    def two_choices(self, names: Sequence[str]) -> str:
        first, second = self.random.choice(names), self.random.choice(names)
        return first if self.load[first] <= self.load[second] else second


Choice = Callable[[View, Sequence[str], str], str]
"""From a view, the candidates and an adapter to a candidate."""


class Baseline(View):
    """A policy given as a function."""

    def __init__(
        self, order: RendezvousOrder, random: Random, choice: Choice, *, needs_adapter: bool
    ) -> None:
        super().__init__(order, random)
        self._choice, self._needs_adapter = choice, needs_adapter

    def choose(self, request: RoutedRequest, *, leave_out: Collection[str] = ()) -> str:
        candidates = [name for name in self.ready if name not in leave_out]
        if not candidates:
            raise NoReplicaReady
        if request.adapter is None and self._needs_adapter:
            return self.two_choices(candidates)
        return self._choice(self, candidates, request.adapter or "")


def at_random(view: View, candidates: Sequence[str], _adapter: str) -> str:
    return view.random.choice(candidates)


def round_robin(view: View, candidates: Sequence[str], _adapter: str) -> str:
    view.num_chosen += 1
    return candidates[view.num_chosen % len(candidates)]


def two_choices(view: View, candidates: Sequence[str], _adapter: str) -> str:
    return view.two_choices(candidates)


def hashing(view: View, candidates: Sequence[str], adapter: str) -> str:
    accepted = set(candidates)
    return next(name for name in view.order.of(adapter) if name in accepted)


def bounded_hashing(view: View, candidates: Sequence[str], adapter: str) -> str:
    """Mirrokni, Thorup, Zadimoghaddam (2016), with c = 1.25."""
    accepted = set(candidates)
    bound = 1.25 * (sum(view.load[name] for name in candidates) + 1) / len(candidates)
    order = [name for name in view.order.of(adapter) if name in accepted]
    return next((name for name in order if view.load[name] + 1 <= bound), order[0])


def scores(view: View, candidates: Sequence[str], adapter: str) -> str:
    """The best sum of affinity and queue scores, as the LoRA scorer of llm-d's gateway gives."""
    loads = [view.load[name] for name in candidates]
    low, high = min(loads), max(loads)

    def score(name: str) -> float:
        affinity = 1.0 if adapter in view.residents[name] else 0.0
        queue = 1 - (view.load[name] - low) / (high - low) if high > low else 1.0
        return affinity + queue

    best = [(score(name), view.random.random(), name) for name in candidates]
    return max(best)[2]


def multiplexing(view: View, candidates: Sequence[str], adapter: str) -> str:
    """Ray Serve's: those that report the ID, else those with the fewest IDs; two choices."""
    holders = [name for name in candidates if adapter in view.residents[name]]
    if not holders:
        fewest = min(len(view.residents[name]) for name in candidates)
        holders = [name for name in candidates if len(view.residents[name]) == fewest]
    return view.two_choices(holders)


OURS = "ours"
BASELINES: Mapping[str, tuple[Choice, bool]] = {
    "random": (at_random, False),
    "round_robin": (round_robin, False),
    "two_choices": (two_choices, False),
    "hashing": (hashing, True),
    "bounded_hashing": (bounded_hashing, True),
    "scores": (scores, True),
    "multiplexing": (multiplexing, True),
}
POLICIES = (OURS, *BASELINES)


def make_policy(name: str, order: RendezvousOrder, seed: int) -> Policy:
    if name == OURS:
        return Router(order)
    choice, needs_adapter = BASELINES[name]
    return Baseline(order, Random(seed), choice, needs_adapter=needs_adapter)
