"""Reads of local block files into host memory, begun in the order of the requests.

A read that finds no room is tried again once some was freed, alone: nothing behind it overtakes it,
so small adapters cannot starve a large one.
"""

from __future__ import annotations

from bisect import insort
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from .block import PlacedExtra
from .identity import AdapterKey
from .loaders import Loaders


class Block(Protocol):
    """One adapter's block in host memory."""

    @property
    def num_elements(self) -> int: ...

    @property
    def table(self) -> npt.NDArray[np.int64]: ...

    @property
    def extras(self) -> tuple[PlacedExtra, ...]: ...


BlockT = TypeVar("BlockT", bound=Block)
BlockT_co = TypeVar("BlockT_co", bound=Block, covariant=True)
BlockT_contra = TypeVar("BlockT_contra", bound=Block, contravariant=True)


class Host(Protocol[BlockT_co]):
    """Host memory; `host_cache.HostCache` states the contract."""

    def keys(self) -> list[AdapterKey]: ...

    def holds(self, key: AdapterKey) -> bool: ...

    def acquire(self, key: AdapterKey) -> BlockT_co | None: ...

    def release(self, key: AdapterKey) -> None: ...

    def read(self, key: AdapterKey, path: Path) -> BlockT_co | None: ...

    def remove(self, key: AdapterKey) -> None: ...

    def size_of(self, key: AdapterKey) -> int: ...

    def size_on_disk(self, path: Path) -> int: ...

    @property
    def used_bytes(self) -> int: ...


@dataclass(order=True)
class _Read:
    order: int
    key: AdapterKey = field(compare=False)
    path: Path = field(compare=False)
    was_refused: bool = field(default=False, compare=False)
    """Host memory was full of blocks in use."""


class ReadQueue(Generic[BlockT]):
    """Not thread-safe: its owner calls it, the loader threads only run `host.read`."""

    def __init__(self, host: Host[BlockT], loaders: Loaders) -> None:
        self._host = host
        self._loaders = loaders
        self._queued: list[_Read] = []  # by order
        self._running: dict[AdapterKey, tuple[_Read, Future[BlockT | None]]] = {}
        self._is_room_new = False  # since the last retry was begun

    def __len__(self) -> int:
        return len(self._queued) + len(self._running)

    def is_running(self, key: AdapterKey) -> bool:
        return key in self._running

    def add(self, key: AdapterKey, path: Path, *, order: int) -> None:
        insort(self._queued, _Read(order, key, path))

    def discard(self, key: AdapterKey) -> None:
        """Forget a read that was not begun."""
        self._queued = [read for read in self._queued if read.key != key]

    def note_room(self) -> None:
        """Host memory came out of use: a refused read may succeed now."""
        self._is_room_new = True

    def start(self) -> None:
        """Begin every read that may run now."""
        while self._queued and not any(read.was_refused for read, _ in self._running.values()):
            if self._queued[0].was_refused:
                if not self._is_room_new:
                    return
                self._is_room_new = False
            read = self._queued.pop(0)
            num_bytes = self._host.size_on_disk(read.path)
            future = self._loaders.submit(num_bytes, self._host.read, read.key, read.path)
            self._running[read.key] = read, future

    def take_finished(self) -> list[tuple[AdapterKey, BlockT | Exception]]:
        """The blocks that arrived, in use, and the errors of the reads that failed."""
        finished: list[tuple[AdapterKey, BlockT | Exception]] = []
        for key, (read, future) in list(self._running.items()):
            if not future.done():
                continue
            del self._running[key]
            try:
                block = future.result()
            except Exception as exc:  # any error is this adapter's own
                self.note_room()
                finished.append((key, exc))
                continue
            if block is None:
                read.was_refused = True
                insort(self._queued, read)
            else:
                finished.append((key, block))
        return finished
