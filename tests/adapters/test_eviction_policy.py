"""The eviction key is one order over byte shares, recency, stays, turns and pins."""

from __future__ import annotations

from itertools import count
from typing import Any

from loraplex.adapters.byte_shares import Surplus
from loraplex.adapters.demand import Demand
from loraplex.adapters.eviction_policy import EvictionPolicy
from loraplex.adapters.extents import Extent, Placement
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.record import Record, State
from support.blocks import make_key

NOW = 1000.0
LONG_AGO = 0.0
NO_SURPLUS = Surplus(frozenset(), is_newcomer_beyond=False)


class Arena:
    """Room for 100 elements, under a clock that stands still."""

    def __init__(self, num_soon: int = 2) -> None:
        self.demand = Demand(100, num_soon, lambda: NOW)
        self.policy = EvictionPolicy(100, self.demand, lambda: NOW)
        self.occupants: list[Record[Any]] = []
        self._offsets = count(step=10)

    def hold(
        self, name: str, *, tenant: str = "x", used: float = LONG_AGO, kept_until: float = 0.0
    ) -> AdapterKey:
        """A resident adapter of 10 elements."""
        record: Record[Any] = Record(make_key(name, tenant), State.RESIDENT, last_used=used)
        record.kept_until = kept_until
        record.placement = Placement(len(self.occupants), 1, Extent(next(self._offsets), 10))
        self.occupants.append(record)
        return record.key

    def order(self, surplus: Surplus = NO_SURPLUS, *, is_overdue: bool = False) -> list[AdapterKey]:
        ordered = sorted(
            self.occupants,
            key=lambda record: self.policy.eviction_key(record, surplus, is_overdue=is_overdue),
        )
        return [record.key for record in ordered]

    def victims(self, newcomer: Record[Any], size: int = 10) -> set[AdapterKey]:
        found = self.policy.newcomer(newcomer, size, self.occupants)
        return {
            record.key for record in self.occupants if self.policy.cost(record, found) is not None
        }


def test_surplus_goes_first_then_by_recency_then_stays_then_turns_and_pins_last() -> None:
    arena = Arena()
    pinned = arena.hold("pinned", used=1.0)
    next_turn, last_turn = arena.hold("next", used=2.0), arena.hold("last", used=3.0)
    kept = arena.hold("kept", used=4.0, kept_until=NOW + 1)
    recent, old = arena.hold("recent", used=6.0), arena.hold("old", used=5.0)
    surplus = arena.hold("surplus", used=7.0, kept_until=NOW + 1)
    arena.demand.pins.set([pinned])
    arena.demand.next_uses.set([next_turn, last_turn])
    beyond = Surplus(frozenset({surplus, last_turn}), is_newcomer_beyond=False)
    assert arena.order(beyond) == [surplus, old, recent, kept, last_turn, next_turn, pinned]


def test_for_an_overdue_newcomer_turns_and_stays_count_no_more() -> None:
    arena = Arena()
    pinned = arena.hold("pinned", used=1.0)
    kept = arena.hold("kept", used=3.0, kept_until=NOW + 1)
    expected, ordinary = arena.hold("expected", used=2.0), arena.hold("ordinary", used=4.0)
    arena.demand.pins.set([pinned])
    arena.demand.next_uses.set([expected])
    assert arena.order(is_overdue=True) == [expected, kept, ordinary, pinned]


def test_whose_turn_is_sooner_stays_for_the_newcomer() -> None:
    arena = Arena()
    first, second, unnamed = (arena.hold(name) for name in ("first", "second", "unnamed"))
    newcomer = make_key("newcomer")
    arena.demand.next_uses.set([first, newcomer, second])
    record: Record[Any] = Record(newcomer, is_requested=True)
    assert arena.victims(record) == {second, unnamed}
    arena.demand.pins.set([newcomer])
    assert arena.victims(record) == {first, second, unnamed}, "a pin comes before all turns"


def test_a_stay_ends_for_a_request_and_for_nothing_else() -> None:
    arena = Arena()
    kept = arena.hold("kept", kept_until=NOW + 1)
    assert arena.victims(Record(make_key("wished"))) == set()
    assert arena.victims(Record(make_key("asked"), is_requested=True)) == {kept}


def test_beyond_its_share_a_tenant_evicts_its_own_and_what_is_at_rest() -> None:
    arena = Arena()
    own, busy = arena.hold("own", used=NOW), arena.hold("busy", tenant="y", used=NOW)
    at_rest = arena.hold("at rest", tenant="y", used=NOW - 30)
    newcomer: Record[Any] = Record(make_key("newcomer", "x"), is_requested=True)
    assert arena.victims(newcomer, size=10) == {own, busy, at_rest}
    assert arena.victims(newcomer, size=60) == {own, at_rest}
