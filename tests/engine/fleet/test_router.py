"""The router against rules stated over all states that hypothesis draws."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.fleet.errors import NoReplicaReady
from loraplex.engine.fleet.rendezvous import RendezvousOrder
from loraplex.engine.fleet.replica_state import ReplicaState, ReplicaStats
from loraplex.engine.fleet.router import RoutedRequest, Router

MAX_BATCH = 64
NAMES = [f"r{number}" for number in range(6)]
ADAPTERS = [f"a{number}" for number in range(8)]


@dataclass
class Fleet:
    """What a router was told, to build it anew and to compute with."""

    states: dict[str, ReplicaState]
    stats: dict[str, ReplicaStats]
    opened: list[tuple[RoutedRequest, str]] = field(default_factory=list)

    def router(self) -> Router:
        router = Router(RendezvousOrder())
        for name, state in self.states.items():
            router.set_state(name, ReplicaState.READY)
            router.report(name, self.stats[name])
            if state is not ReplicaState.READY:
                router.set_state(name, state)
        for request, name in self.opened:
            router.open(request, name)
        return router

    def ready(self) -> list[str]:
        return [name for name, state in self.states.items() if state is ReplicaState.READY]

    def load(self) -> Counter[str]:
        own = Counter(name for _, name in self.opened)
        return Counter({name: self.stats[name].num_requests + own[name] for name in self.states})


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    state = st.sampled_from([ReplicaState.READY] * 3 + list(ReplicaState)[1:3])
    loads = st.integers(0, 120)
    residents = st.frozensets(st.sampled_from(ADAPTERS))
    return Fleet(
        states={name: draw(state) for name in names},
        stats={name: ReplicaStats(draw(loads), MAX_BATCH, draw(residents)) for name in names},
    )


def request(
    number: int = 0,
    adapter: str | None = "a0",
    *,
    group: str | None = None,
    blocks: tuple[bytes, ...] = (),
) -> RoutedRequest:
    return RoutedRequest(f"q{number}", adapter, group, blocks)


def idle_router(names: list[str]) -> Router:
    fleet = Fleet(
        dict.fromkeys(names, ReplicaState.READY),
        dict.fromkeys(names, ReplicaStats(0, MAX_BATCH, frozenset())),
    )
    return fleet.router()


def first_of(adapter: str, names: list[str] = NAMES) -> str:
    return RendezvousOrder(names).of(adapter)[0]


adapters = st.sampled_from([*ADAPTERS, None])


@given(fleets(), adapters, st.frozensets(st.sampled_from(NAMES)))
def test_chooses_only_ready_replicas_that_did_not_refuse(
    fleet: Fleet, adapter: str | None, refused: frozenset[str]
) -> None:
    allowed = set(fleet.ready()) - refused
    if not allowed:
        with pytest.raises(NoReplicaReady):
            fleet.router().choose(request(adapter=adapter), leave_out=refused)
        return
    assert fleet.router().choose(request(adapter=adapter), leave_out=refused) in allowed


@given(fleets(), st.sampled_from(ADAPTERS))
def test_keeps_the_bound(fleet: Fleet, adapter: str) -> None:
    ready = fleet.ready()
    if not ready:
        return
    chosen = fleet.router().choose(request(adapter=adapter))
    load = fleet.load()
    mean = (sum(load[name] for name in ready) + 1) / len(ready)
    assert load[chosen] < max(1.25 * MAX_BATCH, 1.75 * mean)
    if adapter not in fleet.stats[chosen].residents:
        assert load[chosen] < max(0.75 * MAX_BATCH, mean), "no load for a replica that is full"


@given(fleets(), adapters)
def test_the_same_state_gives_the_same_choice(fleet: Fleet, adapter: str | None) -> None:
    if fleet.ready():
        chosen = {fleet.router().choose(request(adapter=adapter)) for _ in range(3)}
        assert len(chosen) == 1


@given(fleets(), st.integers(2, 6), adapters)
def test_a_group_stays_on_one_replica(fleet: Fleet, size: int, adapter: str | None) -> None:
    if not fleet.ready():
        return
    router, chosen = fleet.router(), set()
    for number in range(size):
        member = request(number, adapter, group="g")
        chosen.add(router.choose(member))
        router.open(member, router.choose(member))
    assert len(chosen) == 1


@given(st.sampled_from(ADAPTERS), st.sampled_from(NAMES))
def test_only_the_adapters_of_a_replica_that_leaves_move(adapter: str, leaving: str) -> None:
    router = idle_router(NAMES)
    before = router.choose(request(adapter=adapter))
    router.set_state(leaving, ReplicaState.GONE)
    after = router.choose(request(adapter=adapter))
    assert after == before or before == leaving


@given(st.sampled_from(ADAPTERS), st.sampled_from(NAMES))
def test_adapters_move_only_to_a_replica_that_joins(adapter: str, joining: str) -> None:
    others = [name for name in NAMES if name != joining]
    before = idle_router(others).choose(request(adapter=adapter))
    after = idle_router(NAMES).choose(request(adapter=adapter))
    assert after in (before, joining)


def test_a_replica_that_leaves_spreads_its_adapters_over_the_others() -> None:
    names = [f"r{number}" for number in range(10)]
    order = RendezvousOrder(names)
    first = {f"a{number}": order.of(f"a{number}")[0] for number in range(2000)}
    order.remove("r0")
    heirs = Counter(order.of(adapter)[0] for adapter, name in first.items() if name == "r0")
    assert set(heirs) == set(names) - {"r0"}
    assert max(heirs.values()) < 3 * min(heirs.values())


def test_an_adapter_stays_on_the_first_of_its_order_up_to_the_bound() -> None:
    router = idle_router(NAMES)
    chosen = []
    for number in range(81):
        chosen.append(router.choose(request(number)))
        router.open(request(number), chosen[-1])
    assert chosen[:80] == [first_of("a0")] * 80, "a short queue is better than another load"
    assert chosen[80] == RendezvousOrder(NAMES).of("a0")[1]


def test_a_replica_without_the_adapter_is_passed_over_before_its_batch_is_full() -> None:
    first, second, *_ = RendezvousOrder(NAMES).of("a0")
    for load, expected in ((47, first), (48, second)):
        router = idle_router(NAMES)
        router.report(first, ReplicaStats(load, MAX_BATCH, frozenset()))
        assert router.choose(request()) == expected


def test_the_least_loaded_resident_is_chosen_whatever_its_place_in_the_order() -> None:
    router = idle_router(NAMES)
    first, second, *_, last = RendezvousOrder(NAMES).of("a0")
    for name, load in ((first, 7), (last, 6)):
        router.report(name, ReplicaStats(load, MAX_BATCH, frozenset({"a0"})))
    assert router.choose(request()) == last, "the second has no request, and lacks the adapter"
    router.report(second, ReplicaStats(6, MAX_BATCH, frozenset({"a0"})))
    assert router.choose(request()) == second, "of equal loads, the first of the order"


def test_beyond_the_residents_bounds_another_replica_of_the_order_loads_the_adapter() -> None:
    router = idle_router(NAMES)
    first, second, *_, last = RendezvousOrder(NAMES).of("a0")
    router.report(first, ReplicaStats(80, MAX_BATCH, frozenset({"a0"})))
    router.report(last, ReplicaStats(79, MAX_BATCH, frozenset({"a0"})))
    assert router.choose(request()) == last
    router.open(request(), last)
    assert router.choose(request()) == second


def test_requests_between_two_reports_count() -> None:
    """Eight routers with the same reports would otherwise all send to the same replica."""
    router = idle_router(NAMES)
    for number in range(120):
        router.open(request(number, None), router.choose(request(number, None)))
    used = Counter(router.choose(request(number, None)) for number in range(120, 200))
    assert len(used) > 3


def test_a_report_does_not_count_the_own_requests_twice() -> None:
    router = idle_router(["r0", "r1"])
    for number in range(6):
        router.open(request(number), "r0")
    router.report("r0", ReplicaStats(6, MAX_BATCH, frozenset()))
    router.report("r1", ReplicaStats(7, MAX_BATCH, frozenset()))
    bases = {router.choose(request(number, None)) for number in range(100, 140)}
    assert bases == {"r0", "r1"}  # r1 only where both choices are r1
    for number in range(6):
        router.close(f"q{number}")
    router.report("r0", ReplicaStats(0, MAX_BATCH, frozenset()))
    assert router.choose(request(adapter=None)) in {"r0", "r1"}


def test_a_prompt_goes_where_its_first_blocks_were_computed() -> None:
    router = idle_router(NAMES)
    other = RendezvousOrder(NAMES).of("a0")[3]
    router.report(first_of("a0"), ReplicaStats(0, MAX_BATCH, frozenset({"a0"})))
    router.open(request(1, blocks=(b"1", b"2")), other)
    assert router.choose(request(2, blocks=(b"1", b"3"))) == other
    assert router.choose(request(2, blocks=(b"4",))) == first_of("a0")
    router.set_state(other, ReplicaState.REFUSING)
    router.set_state(other, ReplicaState.READY)
    assert router.choose(request(2, blocks=(b"1", b"3"))) == first_of("a0"), "its KV cache is lost"


def test_a_replica_with_prefixes_on_disk_stays_their_home_until_it_is_gone() -> None:
    router = idle_router(NAMES)
    other = RendezvousOrder(NAMES).of("a0")[3]
    router.report(first_of("a0"), ReplicaStats(0, MAX_BATCH, frozenset({"a0"})))
    router.report(other, ReplicaStats(0, MAX_BATCH, frozenset(), keeps_prefixes=True))
    router.open(request(1, blocks=(b"1", b"2")), other)
    router.set_state(other, ReplicaState.REFUSING)
    assert router.choose(request(2, blocks=(b"1", b"3"))) == first_of("a0")
    router.set_state(other, ReplicaState.READY)
    router.report(other, ReplicaStats(0, MAX_BATCH, frozenset({"a0"}), keeps_prefixes=True))
    assert router.choose(request(2, blocks=(b"1", b"3"))) == other
    router.set_state(other, ReplicaState.GONE)
    router.set_state(other, ReplicaState.READY)
    router.report(other, ReplicaStats(0, MAX_BATCH, frozenset({"a0"})))
    assert router.choose(request(2, blocks=(b"1", b"3"))) == first_of("a0")


def test_a_group_moves_when_its_replica_accepts_no_requests() -> None:
    router = idle_router(NAMES)
    router.open(request(1, group="g"), first_of("a0"))
    router.set_state(first_of("a0"), ReplicaState.DRAINING)
    moved = router.choose(request(2, group="g"))
    assert moved != first_of("a0")
    router.open(request(2, group="g"), moved)
    router.close("q1")
    assert router.choose(request(3, group="g")) == moved


@given(fleets(), adapters, st.frozensets(st.sampled_from(NAMES)))
def test_suspects_of_an_adapter_run_on_the_first_of_its_order_that_accepts_requests(
    fleet: Fleet, adapter: str | None, refused: frozenset[str]
) -> None:
    allowed = set(fleet.ready()) - refused
    if not allowed:
        return
    router, others = fleet.router(), fleet.router()
    in_order = RendezvousOrder(fleet.states).of(adapter or "")
    expected = next(name for name in in_order if name in allowed)
    for number in range(20):
        suspect = replace(request(number, adapter), is_confined=True)
        assert router.choose(suspect, leave_out=refused) == expected
        router.open(suspect, expected)
    assert others.choose(replace(request(99, adapter), is_confined=True), leave_out=refused) == (
        expected
    )


def test_a_suspect_leaves_its_group_and_the_home_of_its_prompt() -> None:
    router = idle_router(NAMES)
    other = RendezvousOrder(NAMES).of("a0")[3]
    router.open(request(1, group="g", blocks=(b"1",)), other)
    suspect = replace(request(2, group="g", blocks=(b"1",)), is_confined=True)
    assert router.choose(suspect) == first_of("a0")


def test_requests_of_a_replica_that_left_can_still_be_closed() -> None:
    router = idle_router(["r0", "r1"])
    router.open(request(), "r0")
    router.set_state("r0", ReplicaState.GONE)
    router.close("q0")
    assert router.choose(request()) == "r1"
