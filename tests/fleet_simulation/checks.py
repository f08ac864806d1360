"""What must hold of every choice, by books that the simulation keeps apart from the router's."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from enum import StrEnum

from loraplex.engine.fleet.replica_state import ReplicaStats
from loraplex.engine.fleet.router import RoutedRequest

from . import scenario as costs


class Rule(StrEnum):
    """The names that a report uses."""

    READY = "R1 a replica is chosen only while the router was told that it is ready"
    NOT_AGAIN = "R2 a request is not sent again to a replica that refused it"
    BOUND = "R3 a replica at the bound is not chosen for an adapter"
    GROUP = "R4 a group's requests run on one replica while it accepts requests"


class Violation(Exception):
    """A rule does not hold."""

    def __init__(self, rule: Rule, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


class Checks:
    """The books of one router: what it was told, and what it has open."""

    def __init__(self) -> None:
        self._ready: set[str] = set()
        self._own: Counter[str] = Counter()
        self._others: Counter[str] = Counter()
        self._residents: defaultdict[str, set[str | None]] = defaultdict(set)
        self._groups: dict[str, str] = {}
        self._open_of_group: Counter[str] = Counter()

    def told_ready(self, name: str, is_ready: bool) -> None:
        if is_ready:
            self._ready.add(name)
        else:
            self._ready.discard(name)
            self._others[name] = 0
            self._residents[name].clear()

    def told_load(self, name: str, stats: ReplicaStats) -> None:
        self._others[name] = max(0, stats.num_requests - self._own[name])
        self._residents[name] = set(stats.residents)

    def chosen(self, request: RoutedRequest, name: str, refused: Collection[str]) -> None:
        """Raises Violation."""
        _require(name in self._ready, Rule.READY, name)
        _require(name not in refused, Rule.NOT_AGAIN, name)
        home = self._groups.get(request.group_id) if request.group_id else None
        if home in self._ready and home not in refused:
            _require(name == home, Rule.GROUP, f"{request.group_id} on {home} and {name}")
        elif request.adapter is not None:
            candidates = self._ready.difference(refused)
            total = sum(self._own[each] + self._others[each] for each in candidates)
            mean = (total + 1) / len(candidates)
            has_it = request.adapter in self._residents[name]
            share, relative = (1.25, 1.75) if has_it else (0.75, 1.0)
            bound = max(share * costs.MAX_BATCH, relative * mean)
            load = self._own[name] + self._others[name]
            _require(load < bound, Rule.BOUND, f"{load} on {name}, bound {bound:.1f}")

    def opened(self, request: RoutedRequest, name: str) -> None:
        self._own[name] += 1
        self._residents[name].add(request.adapter)
        if request.group_id is not None:
            self._groups[request.group_id] = name
            self._open_of_group[request.group_id] += 1

    def closed(self, request: RoutedRequest, name: str) -> None:
        self._own[name] -= 1
        group = request.group_id
        if group is not None:
            self._open_of_group[group] -= 1
            if not self._open_of_group[group]:
                del self._groups[group]


def _require(condition: bool, rule: Rule, detail: str) -> None:
    if not condition:
        raise Violation(rule, detail)
