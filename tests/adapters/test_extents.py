"""Extents never overlap, nothing is lost, and adjacent free extents merge."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.adapters.extents import Extent, ExtentAllocator

CAPACITY, ALIGNMENT = 64, 4


def test_sizes_are_rounded_up_and_the_capacity_down_to_the_alignment() -> None:
    allocator = ExtentAllocator(67, alignment=4)
    assert allocator.capacity == 64
    assert allocator.allocate(5) == Extent(0, 8)
    assert allocator.allocate(4) == Extent(8, 4)
    assert allocator.used == 12


def test_takes_the_tightest_run_that_fits() -> None:
    allocator = ExtentAllocator(100)
    for size in (40, 10, 20, 30):
        allocator.allocate(size)
    allocator.free(Extent(0, 40))
    allocator.free(Extent(50, 20))
    assert allocator.allocate(18) == Extent(50, 18)


def test_none_when_free_space_is_enough_but_scattered() -> None:
    allocator = ExtentAllocator(30)
    for _ in range(3):
        allocator.allocate(10)
    allocator.free(Extent(0, 10))
    allocator.free(Extent(20, 10))
    assert allocator.largest_free == 10
    assert allocator.allocate(11) is None
    allocator.free(Extent(10, 10))
    assert allocator.allocate(30) == Extent(0, 30)


@pytest.mark.parametrize(
    ("size", "expected"), [(8, Extent(0, 8)), (10, Extent(20, 10)), (11, None)]
)
def test_stays_out_of_the_avoided_range(size: int, expected: Extent | None) -> None:
    allocator = ExtentAllocator(30)
    assert allocator.allocate(size, avoid=[Extent(8, 12)]) == expected
    allocator.check()


def test_an_empty_arena_grants_nothing() -> None:
    allocator = ExtentAllocator(3, alignment=4)
    assert allocator.capacity == allocator.largest_free == 0
    assert allocator.allocate(1) is None
    allocator.check()


@pytest.mark.parametrize("extent", [Extent(0, 5), Extent(0, 9), Extent(5, 5), Extent(10, 10)])
def test_only_what_was_allocated_can_be_freed(extent: Extent) -> None:
    allocator = ExtentAllocator(20)
    allocator.allocate(10)
    with pytest.raises(AssertionError, match="not allocated"):
        allocator.free(extent)


@pytest.mark.parametrize(
    ("holes", "left"),
    [
        ([], [Extent(10, 10)]),
        ([Extent(0, 10)], [Extent(10, 10)]),
        ([Extent(20, 5)], [Extent(10, 10)]),
        ([Extent(10, 3)], [Extent(13, 7)]),
        ([Extent(17, 3)], [Extent(10, 7)]),
        ([Extent(12, 3)], [Extent(10, 2), Extent(15, 5)]),
        ([Extent(16, 2), Extent(12, 3)], [Extent(10, 2), Extent(15, 1), Extent(18, 2)]),
        ([Extent(5, 30)], []),
    ],
)
def test_parts_of_an_extent_around_others(holes: list[Extent], left: list[Extent]) -> None:
    assert Extent(10, 10).without(*holes) == left


class ExtentMachine(RuleBasedStateMachine):
    """The model is an array that says who owns each element."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = ExtentAllocator(CAPACITY, alignment=ALIGNMENT)
        self.owners: list[Extent | None] = [None] * CAPACITY
        self.extents: list[Extent] = []

    def free_runs(self, avoid: list[Extent]) -> list[int]:
        taken = [
            owner is not None or any(other.offset <= index < other.end for other in avoid)
            for index, owner in enumerate(self.owners)
        ]
        text = "".join("x" if is_taken else "." for is_taken in taken)
        return [len(run) for run in text.split("x") if run]

    @rule(
        size=st.integers(1, CAPACITY),
        avoid=st.lists(
            st.builds(
                lambda start, size: Extent(start * ALIGNMENT, size * ALIGNMENT),
                st.integers(0, CAPACITY // ALIGNMENT - 1),
                st.integers(1, 4),
            ),
            max_size=3,
        ),
    )
    def allocate(self, size: int, avoid: list[Extent]) -> None:
        rounded = -(-size // ALIGNMENT) * ALIGNMENT
        fits = [run for run in self.free_runs(avoid) if run >= rounded]
        extent = self.allocator.allocate(size, avoid=avoid)
        assert (extent is not None) == bool(fits)
        if extent is None:
            return
        assert extent.size == rounded
        assert not any(extent.overlaps(other) for other in avoid)
        assert all(owner is None for owner in self.owners[extent.offset : extent.end])
        self.owners[extent.offset : extent.end] = [extent] * extent.size
        self.extents.append(extent)

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        extent = data.draw(st.sampled_from(self.extents))
        self.allocator.free(extent)
        self.extents.remove(extent)
        self.owners[extent.offset : extent.end] = [None] * extent.size

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.allocator.check()
        assert self.allocator.used == sum(owner is not None for owner in self.owners)
        assert self.allocator.largest_free == max(self.free_runs([]), default=0)


TestExtentMachine = ExtentMachine.TestCase
TestExtentMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_resized_array_keeps_what_is_allocated() -> None:
    allocator = ExtentAllocator(20)
    first = allocator.allocate(8)
    allocator.resize(30)
    allocator.check()
    assert allocator.largest_free == 22
    allocator.resize(8)
    allocator.check()
    assert (allocator.num_free, first) == (0, Extent(0, 8))
    allocator.resize(12)
    allocator.check()
    assert allocator.allocate(4) == Extent(8, 4)


def test_what_is_allocated_is_not_taken_away() -> None:
    allocator = ExtentAllocator(20)
    allocator.allocate(8)
    with pytest.raises(AssertionError):
        allocator.resize(7)
