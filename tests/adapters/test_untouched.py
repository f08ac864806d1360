from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.malloc import return_freed_memory
from loraplex.adapters.untouched import (
    CAN_GIVE_BACK,
    give_back,
    give_back_rows,
    untouched_zeros,
    use_small_pages,
)
from loraplex.kernels.kv_pages import allocate_zeros

MIB = 1 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(not CAN_GIVE_BACK, reason="only Linux takes memory back at once")
def test_memory_that_is_given_back_is_the_systems() -> None:
    memory = untouched_zeros(64 * MIB, torch.uint8)
    use_small_pages(memory)
    memory.fill_(1)
    before = resident_bytes()
    give_back(memory[16 * MIB : 48 * MIB])
    assert before - resident_bytes() >= 30 * MIB


@pytest.mark.skipif(not CAN_GIVE_BACK, reason="reads Linux's /proc")
def test_memory_has_no_pages_before_the_first_write() -> None:
    # glibc takes such sizes from its heap after one was freed; there a gap of the second is left.
    for _ in range(2):
        freed = torch.ones(24 * MIB, dtype=torch.uint8)
        behind = torch.ones(64 << 10, dtype=torch.uint8)
        del freed
    return_freed_memory()
    before = resident_bytes()
    memory = untouched_zeros(20 * MIB, torch.uint8)
    assert resident_bytes() - before < MIB
    assert not memory.any()
    assert behind.all()


def test_memory_that_is_not_there_is_no_lost_connection() -> None:
    with pytest.raises(MemoryError, match=f"no {1 << 50} bytes of host memory"):
        untouched_zeros(1 << 50, torch.uint8)


def test_no_elements_take_no_room() -> None:
    assert untouched_zeros(0, torch.float32).shape == (0,)


@given(st.integers(0, 20_000), st.integers(0, 20_000))
def test_what_is_given_back_reads_as_zeros_and_the_rest_stays(start: int, size: int) -> None:
    memory = untouched_zeros(40_000, torch.uint8).fill_(7)
    give_back(memory[start : start + size])
    expected = torch.full((40_000,), 7, dtype=torch.uint8)
    expected[start : start + size] = 0
    assert torch.equal(memory, expected)


def test_memory_that_was_given_back_can_be_written_again() -> None:
    memory = untouched_zeros(MIB, torch.float32).fill_(1.0)
    give_back(memory)
    memory[1000:2000] = 3.0
    assert memory.sum() == 3000


@pytest.mark.parametrize("row_bytes", [4096, 5000], ids=["whole pages", "parts of pages"])
def test_rows_are_given_back_without_their_neighbours(row_bytes: int) -> None:
    memory = allocate_zeros((64, row_bytes), torch.uint8, torch.device("cpu")).fill_(7)
    give_back_rows(memory, [(0, 1), (5, 9), (63, 64)])
    gone = [0, 5, 6, 7, 8, 63]
    expected = torch.full_like(memory, 7)
    expected[gone] = 0
    assert torch.equal(memory, expected)
