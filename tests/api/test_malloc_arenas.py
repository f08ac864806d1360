"""Threads of a server share the C library's arenas."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from support.server import child_environment

ALLOCATE = """
import ctypes, threading
from loraplex.api.malloc_arenas import share_arenas

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
are_all_there = threading.Barrier(12)
def allocate():
    are_all_there.wait()
    pointer = libc.malloc(1000)
    are_all_there.wait()
    libc.free(pointer)

share_arenas()
threads = [threading.Thread(target=allocate) for _ in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fflush.argtypes = [ctypes.c_void_p]
out = libc.fdopen(1, b"w")
libc.malloc_info(0, out)
libc.fflush(out)
"""

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_info"), reason="the C library is not glibc"
)


def num_arenas(**changes: str) -> int:
    """Of a process in which twelve threads allocate at once."""
    environment = child_environment(**changes)
    command = [sys.executable, "-c", ALLOCATE]
    return subprocess.check_output(command, env=environment).count(b"<heap nr=")


@pytest.mark.skipif("MALLOC_ARENA_MAX" in os.environ, reason="it is set here")
def test_many_threads_share_two() -> None:
    assert num_arenas() == 2


def test_what_the_operator_set_stays() -> None:
    assert num_arenas(MALLOC_ARENA_MAX="5") == 5
