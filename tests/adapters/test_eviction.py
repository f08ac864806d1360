"""The cheapest window that makes enough room, compared with an exhaustive search."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.eviction import FREE, Cost, Occupant, choose_window
from loraplex.adapters.extents import Extent
from support.blocks import make_key

CAPACITY = 20


def occupant(offset: int, size: int, last_used: float | None) -> Occupant:
    cost = None if last_used is None else Cost(1, last_used)
    return Occupant(Extent(offset, size), make_key(f"at {offset}"), cost)


def test_evicts_the_least_recently_used_one_that_is_large_enough() -> None:
    old_small = occupant(0, 4, 1.0)
    old_large = occupant(4, 8, 2.0)
    new_large = occupant(12, 8, 3.0)
    window = choose_window(6, capacity=CAPACITY, occupants=[new_large, old_small, old_large])
    assert window is not None
    assert window.victims == (old_large.key,)


def test_counts_the_free_space_beside_a_victim() -> None:
    occupants = [occupant(0, 5, 9.0), occupant(8, 4, 1.0), occupant(15, 5, 2.0)]
    window = choose_window(10, capacity=CAPACITY, occupants=occupants)
    assert window is not None
    assert window.victims == (occupants[1].key,)
    assert window.extent == Extent(5, 10)


def test_a_window_costs_as_much_as_its_most_recently_used_victim() -> None:
    dear, cheap, wall = occupant(0, 4, 5.0), occupant(4, 4, 1.0), occupant(8, 4, None)
    fair = [occupant(12, 4, 3.0), occupant(16, 4, 3.0)]
    window = choose_window(8, capacity=CAPACITY, occupants=[dear, cheap, wall, *fair])
    assert window is not None
    assert window.victims == tuple(victim.key for victim in fair)


def test_never_evicts_what_may_not_move_nor_touches_what_is_to_be_avoided() -> None:
    occupants = [occupant(0, 10, 1.0), occupant(10, 10, None)]
    assert choose_window(11, capacity=CAPACITY, occupants=occupants) is None
    assert choose_window(5, capacity=CAPACITY, occupants=occupants, avoid=[Extent(0, 10)]) is None


def test_a_cheaper_rank_goes_first_whenever_it_was_used() -> None:
    surplus = Occupant(Extent(0, 4), make_key("surplus"), Cost(0, 9.0))
    ordinary = Occupant(Extent(10, 4), make_key("ordinary"), Cost(1, 1.0))
    window = choose_window(8, capacity=CAPACITY, occupants=[surplus, ordinary])
    assert window is not None
    assert window.victims == (surplus.key,)


def test_what_is_being_zeroed_costs_nothing_and_is_no_victim() -> None:
    vanishing = Occupant(Extent(4, 6), None, FREE)
    occupants = [occupant(0, 4, 1.0), vanishing, occupant(10, 10, 0.5)]
    window = choose_window(6, capacity=CAPACITY, occupants=occupants)
    assert window is not None
    assert (window.extent, window.victims) == (Extent(4, 6), ())
    window = choose_window(10, capacity=CAPACITY, occupants=[*occupants[:2], occupant(10, 10, 2.0)])
    assert window is not None
    assert (window.extent, window.victims) == (Extent(0, 10), (make_key("at 0"),))


@st.composite
def lines(draw: st.DrawFn) -> list[Occupant]:
    bounds = sorted(draw(st.sets(st.integers(0, CAPACITY), max_size=8)))
    return [
        occupant(start, end - start, draw(st.none() | st.floats(0, 5)))
        for start, end in pairwise(bounds)
        if draw(st.booleans())
    ]


@given(occupants=lines(), size=st.integers(1, CAPACITY))
def test_agrees_with_trying_every_set_of_victims(occupants: list[Occupant], size: int) -> None:
    window = choose_window(size, capacity=CAPACITY, occupants=occupants)
    movable = [occupant for occupant in occupants if occupant.cost is not None]
    enough = [
        victims
        for count in range(len(movable) + 1)
        for victims in combinations(movable, count)
        if _largest_hole([other for other in occupants if other not in victims]) >= size
    ]
    if window is None:
        assert not enough
        return
    chosen = [occupant for occupant in movable if occupant.key in window.victims]
    rest = [other for other in occupants if other not in chosen]
    assert all(not other.extent.overlaps(window.extent) for other in rest)
    assert window.extent.size >= size
    assert _dearest(chosen) == min(_dearest(victims) for victims in enough)
    for spared in chosen:  # no victim is gratuitous
        assert all(part.size < size for part in window.extent.without(spared.extent))


def _dearest(victims: Sequence[Occupant]) -> Cost:
    return max((victim.cost for victim in victims if victim.cost is not None), default=FREE)


def _largest_hole(occupants: Sequence[Occupant]) -> int:
    ends = [0, *(occupant.extent.end for occupant in occupants)]
    starts = [*(occupant.extent.offset for occupant in occupants), CAPACITY]
    return max(start - end for end, start in zip(ends, starts, strict=True))
