"""Searches the memory of a server's processes from outside through /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_IN_MEMORY_OR_SWAP = np.uint64(3 << 62)


class Found(NamedTuple):
    """One region of a process's memory that holds some of what was looked for."""

    process: str
    region: str
    """Its line in /proc/<pid>/maps."""
    counts: tuple[int, ...]


def search_memory(root: int, wanted: Sequence[bytes]) -> list[Found]:
    """Where the patterns lie in the memory of the process `root` and of all that descend from it.

    Every readable region counts, but for the code of libraries.
    """
    return [
        Found(_command(pid), region, counts)
        for pid in family(root)
        for region, counts in _search_process(pid, wanted)
        if any(counts)
    ]


def family(root: int) -> list[int]:
    """A process and its descendants."""
    pids = [root]
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids += [int(child) for child in (task / "children").read_text().split()]
    return pids


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def _search_process(pid: int, wanted: Sequence[bytes]) -> Iterator[tuple[str, tuple[int, ...]]]:
    regions = Path(f"/proc/{pid}/maps").read_text().splitlines()
    with open(f"/proc/{pid}/mem", "rb", 0) as memory, open(f"/proc/{pid}/pagemap", "rb", 0) as map_:
        for region in regions:
            addresses, rights, *_ = region.split(maxsplit=2)
            if "r" not in rights or "[v" in region or ("w" not in rights and ".so" in region):
                continue
            start, stop = (int(address, 16) for address in addresses.split("-"))
            contents = [_read(memory, *run) for run in _present_runs(map_, start, stop)]
            yield region, tuple(sum(c.count(pattern) for c in contents) for pattern in wanted)


def _present_runs(page_map: BinaryIO, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The runs of pages that exist: reading what was never touched would take long."""
    first, num_pages = start // PAGE_BYTES, (stop - start) // PAGE_BYTES
    entries = np.frombuffer(os.pread(page_map.fileno(), num_pages * 8, first * 8), np.uint64)
    is_there = entries & _IN_MEMORY_OR_SWAP != 0
    edges = np.flatnonzero(np.diff(is_there, prepend=False, append=False))
    for begin, end in edges.reshape(-1, 2).tolist():
        yield start + begin * PAGE_BYTES, start + end * PAGE_BYTES


def _read(memory: BinaryIO, start: int, stop: int) -> bytes:
    return os.pread(memory.fileno(), stop - start, start)
