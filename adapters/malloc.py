"""Control of the C library's memory allocator, if it is glibc's; a no-op with other C libraries."""

from __future__ import annotations

import ctypes
import os

_M_ARENA_MAX = -8
"""`mallopt`'s number for it, in glibc."""
_LIBC = ctypes.CDLL(None)


def share_arena() -> None:
    """Let all threads allocate from the same arena; must be called before there are threads.

    glibc would create up to eight arenas per core. Each keeps the maximum that its threads ever
    held at once, so they all grow for hours. Python's lock lets few threads allocate at once. The
    operator's own `MALLOC_ARENA_MAX` takes precedence.
    """
    mallopt = getattr(_LIBC, "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Return the pages of freed memory to the system.

    glibc keeps them for later allocations, and the amount only grows: gaps between live allocations
    rarely have the size that is needed next.
    """
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)
