"""Allocates large host memory whose pages are not touched before the first write, and gives pages
back."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

_HUGE_PAGES, _NO_HUGE_PAGES = 14, 15
"""`MADV_HUGEPAGE` and `MADV_NOHUGEPAGE` of Linux, which Python's `mmap` does not name on every
build."""
_LEAST_OF_HUGE_PAGES = 4 << 20
CAN_GIVE_BACK = sys.platform == "linux"
"""Whether `give_back` returns memory: elsewhere the system may keep the old bytes."""


def untouched_zeros(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Zeros `[num_elements]` that start on a page.

    A mapping of their own, where torch would fill them, and calloc what it takes from the heap.
    Of huge pages if they are large, so that the loader threads that write first spend little time
    on page faults. Raises MemoryError.
    """
    num_bytes = num_elements * dtype.itemsize
    try:
        mapping = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as exc:
        raise MemoryError(f"no {num_bytes} bytes of host memory: {exc.strerror}") from exc
    zeros = torch.frombuffer(mapping, dtype=torch.uint8)[:num_bytes]
    if CAN_GIVE_BACK and num_bytes >= _LEAST_OF_HUGE_PAGES:
        _advise(zeros.data_ptr(), zeros.data_ptr() + num_bytes, _HUGE_PAGES)
    return zeros.view(dtype)


def give_back(memory: Tensor) -> None:
    """Zero contiguous CPU memory and return its whole pages to the system, until they are written
    again."""
    start, end = _range_of(memory)
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = end // mmap.PAGESIZE * mmap.PAGESIZE
    if not CAN_GIVE_BACK or last <= first or _advise(first, last, mmap.MADV_DONTNEED):
        memory.zero_()
        return
    as_bytes = memory.view(-1).view(torch.uint8)
    as_bytes[: first - start].zero_()
    as_bytes[len(as_bytes) - (end - last) :].zero_()


def give_back_rows(memory: Tensor, ranges: Sequence[tuple[int, int]]) -> None:
    """The same for half-open ranges of rows of `memory [rows, ...]`, which may be many."""
    start, end = _range_of(memory)
    row_bytes = (end - start) // len(memory)
    for first, last in ranges:
        begin, size = start + first * row_bytes, (last - first) * row_bytes
        is_paged = CAN_GIVE_BACK and not (begin % mmap.PAGESIZE or size % mmap.PAGESIZE)
        if not is_paged or _advise(begin, begin + size, mmap.MADV_DONTNEED):
            give_back(memory[first:last])


def use_small_pages(memory: Tensor) -> None:
    """Let the system back this contiguous CPU memory by small pages alone, so that small parts of
    it can be given back."""
    start, end = _range_of(memory)
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    if CAN_GIVE_BACK and end > first:
        _advise(first, end, _NO_HUGE_PAGES)  # a system without huge pages refuses, and has none


def _range_of(memory: Tensor) -> tuple[int, int]:
    assert memory.is_contiguous()
    assert memory.device.type == "cpu"
    return memory.data_ptr(), memory.data_ptr() + memory.nbytes


def _advise(start: int, end: int, advice: int) -> int:
    """0 if the system took the advice."""
    return int(_madvise()(start, end - start, advice))


@cache
def _madvise() -> Callable[[int, int, int], int]:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
