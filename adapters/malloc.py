"""Control of the C library's memory allocator, if it is glibc's; a no-op with other C libraries."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""`mallopt`'s numbers, in glibc."""
_LEAST_MAPPED, _MOST_MAPPED = 128 << 10, 32 << 20
"""Between these bytes glibc moves the size from which blocks have a mapping of their own."""
_LIBC = ctypes.CDLL(None)


def share_arena() -> None:
    """Let all threads allocate from the same arena; must be called before there are threads.

    glibc would create up to eight arenas per core. Each keeps the maximum that its threads ever
    held at once, so they all grow for hours. Python's lock lets few threads allocate at once. The
    operator's own `MALLOC_ARENA_MAX` takes precedence.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        _set(_M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Return the pages of freed memory to the system.

    glibc keeps them for later allocations, and the amount only grows: gaps between live allocations
    rarely have the size that is needed next.
    """
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def large_blocks_mapped() -> Iterator[None]:
    """Within the context, each new block of 128 KiB or more has a mapping of its own, which returns
    to the system when it is freed.

    glibc begins so. But whenever a larger block is freed, it takes blocks up to that size from the
    heap from then on, where gaps stay between those that live. Loading allocates blocks of many
    sizes once; steps allocate the same ones again and again, so afterwards blocks up to 32 MiB come
    from the heap. The operator's own `MALLOC_MMAP_THRESHOLD_` takes precedence.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        yield
        return
    _set(_M_MMAP_THRESHOLD, _LEAST_MAPPED)
    try:
        yield
    finally:
        _set(_M_MMAP_THRESHOLD, _MOST_MAPPED)
        _set(_M_TRIM_THRESHOLD, 2 * _MOST_MAPPED)


def _set(parameter: int, value: int) -> None:
    mallopt = getattr(_LIBC, "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)
