"""Control of the C library's memory allocator, if it is glibc's; a no-op with other C libraries."""

from __future__ import annotations

import ctypes
import os

_M_ARENA_MAX = -8
"""`mallopt`'s number for it, in glibc."""
_LIBC = ctypes.CDLL(None)


def share_arena() -> None:
    """Let all threads allocate from the same arena; to be called before there are threads.

    glibc would make up to eight per core. Each keeps the most that its threads ever held at once,
    so all of them grow for hours. Python's lock lets few threads allocate at once. An operator's
    own `MALLOC_ARENA_MAX` has precedence.
    """
    mallopt = getattr(_LIBC, "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Give the pages of freed memory back to the system.

    glibc keeps them for the next allocation, and what it keeps only ever grows: holes between live
    allocations are seldom of the size that is needed next.
    """
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)
