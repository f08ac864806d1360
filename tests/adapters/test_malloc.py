"""Threads share the C library's arenas, and freed memory returns to the system."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from support.server import child_environment

ALLOCATE = """
import ctypes, threading
from loraplex.adapters.malloc import share_arena

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
are_all_there = threading.Barrier(12)
def allocate():
    are_all_there.wait()
    pointer = libc.malloc(1000)
    are_all_there.wait()
    libc.free(pointer)

share_arena()
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
def test_many_threads_share_one() -> None:
    assert num_arenas() == 1


def test_what_the_operator_set_stays() -> None:
    assert num_arenas(MALLOC_ARENA_MAX="5") == 5


FREE_MOST = """
import ctypes, os
from pathlib import Path
from loraplex.adapters.malloc import return_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def filled(num_bytes):
    pointer = libc.malloc(num_bytes)
    ctypes.memset(pointer, 1, num_bytes)
    return pointer

pointers = [filled(10_000) for _ in range(10_000)]
for number, pointer in enumerate(pointers):
    if number % 10:
        libc.free(pointer)
before = resident()
return_freed_memory()
print(before - resident())
"""


def test_freed_memory_between_live_allocations_goes_back_to_the_system() -> None:
    command = [sys.executable, "-c", FREE_MOST]
    returned = int(subprocess.check_output(command, env=child_environment()))
    assert returned > 50_000_000, "of 90 MB that were freed"


FREE_LARGE = """
import ctypes, os
from pathlib import Path
from loraplex.adapters.malloc import large_blocks_mapped

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def filled(num_bytes):
    pointer = libc.malloc(num_bytes)
    ctypes.memset(pointer, 1, num_bytes)
    return pointer
def freed_between_live():
    libc.free(filled(8_000_000))
    pointers = [filled(200_000) for _ in range(500)]
    before = resident()
    for pointer in pointers[::2]:
        libc.free(pointer)
    return before - resident()

with large_blocks_mapped():
    print(freed_between_live())
print(freed_between_live())
"""


def freed_large(**changes: str) -> list[int]:
    """The bytes that return to the system at once within the context, and after it, of 50 MB."""
    command = [sys.executable, "-c", FREE_LARGE]
    output = subprocess.check_output(command, env=child_environment(**changes))
    return [int(line) for line in output.split()]


@pytest.mark.skipif("MALLOC_MMAP_THRESHOLD_" in os.environ, reason="it is set here")
def test_large_blocks_that_are_freed_while_loading_return_to_the_system_at_once() -> None:
    while_loading, afterwards = freed_large()
    assert while_loading > 45_000_000
    assert afterwards < 5_000_000


def test_the_operators_own_limit_of_mapped_blocks_stays() -> None:
    while_loading, _ = freed_large(MALLOC_MMAP_THRESHOLD_="1000000")
    assert while_loading < 5_000_000
