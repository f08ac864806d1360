"""How the C library hands memory to the threads of a server."""

from __future__ import annotations

import ctypes
import os

MAX_ARENAS = 2
_M_ARENA_MAX = -8
"""`mallopt`'s number for it, in glibc."""


def share_arenas() -> None:
    """Let all threads take memory from the same two arenas; to be called before there are threads.

    glibc would make up to eight a core. Each keeps the most that its threads ever held at once, and
    which thread reads a large page of a list is chance: all of them grow for hours. Python's lock
    lets few threads allocate at once. An operator's own `MALLOC_ARENA_MAX` stays. Other C libraries
    have no arenas of this kind.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, MAX_ARENAS)
