"""Reads local block files into host memory, the most urgent first.

A read that finds no room is retried when room is freed. While such a read is pending, reads run one
at a time and no less urgent read overtakes it, so small adapters cannot starve a large one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from .block import PlacedExtra
from .identity import AdapterKey
from .loaders import Loaders
from .next_use import NextUseRank


class Block(Protocol):
    """One adapter's block in host memory."""

    @property
    def num_elements(self) -> int: ...

    @property
    def table(self) -> npt.NDArray[np.int64]: ...

    @property
    def auxiliary(self) -> tuple[PlacedExtra, ...]: ...


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


MAX_SUBMITTED = 2
"""The number of reads, and of copies to the device, that are submitted to the loader threads at a
time. The threads take jobs in order, so a job that is not submitted yet can be overtaken by a more
urgent one."""


@dataclass
class _Read:
    key: AdapterKey
    path: Path
    was_refused: bool = False
    """Host memory was full of blocks in use."""


class ReadQueue(Generic[BlockT]):
    """Not thread-safe: its owner calls it, the loader threads only run `host.read`."""

    def __init__(
        self,
        host: Host[BlockT],
        loaders: Loaders,
        next_use_rank: Callable[[AdapterKey], NextUseRank],
    ) -> None:
        self._host = host
        self._loaders = loaders
        self._next_use_rank = next_use_rank
        self._queued: dict[AdapterKey, _Read] = {}
        self._running: dict[AdapterKey, tuple[_Read, Future[BlockT | None]]] = {}
        self._num_refused = 0
        """Of the reads that wait or run, those that found no room before."""
        self._blocked: AdapterKey | None = None

    def __len__(self) -> int:
        return len(self._queued) + len(self._running)

    @property
    def blocked(self) -> AdapterKey | None:
        """The most urgent read, if none begins because there is no room in host memory."""
        return self._blocked

    def is_running(self, key: AdapterKey) -> bool:
        return key in self._running

    def add(self, key: AdapterKey, path: Path) -> None:
        self._queued[key] = _Read(key, path)
        if self._blocked is not None and self._next_use_rank(key) < self._next_use_rank(
            self._blocked
        ):
            self.look_again()

    def discard(self, key: AdapterKey) -> None:
        """Forget a read that was not begun."""
        read = self._queued.pop(key, None)
        if read is not None:
            self._num_refused -= read.was_refused
            self.look_again()

    def look_again(self) -> None:
        """Host memory was freed, or another read is now the most urgent."""
        self._blocked = None

    def reorder(self) -> None:
        """Urgencies have changed."""
        if self._blocked is not None and self._soonest() != self._blocked:
            self.look_again()

    def start(self) -> None:
        """Start the most urgent reads that may run now, up to the concurrency limit."""
        if not self._queued or self._blocked is not None or len(self._running) >= MAX_SUBMITTED:
            return
        for key in sorted(self._queued, key=self._next_use_rank):
            if len(self._running) >= MAX_SUBMITTED or (self._num_refused and self._running):
                return
            read = self._queued.pop(key)
            self._running[key] = read, self._begin(read)

    def _soonest(self) -> AdapterKey:
        return min(self._queued, key=self._next_use_rank)

    def _begin(self, read: _Read) -> Future[BlockT | None]:
        block = self._host.acquire(read.key)
        if block is None:
            num_bytes = self._host.size_on_disk(read.path)
            return self._loaders.submit(num_bytes, self._host.read, read.key, read.path)
        cached: Future[BlockT | None] = Future()
        cached.set_result(block)
        return cached

    def take_finished(self) -> list[tuple[AdapterKey, BlockT | Exception]]:
        """The blocks that arrived, in use, and the errors of the reads that failed."""
        finished: list[tuple[AdapterKey, BlockT | Exception]] = []
        for key, (read, future) in list(self._running.items()):
            if not future.done():
                continue
            del self._running[key]
            self._num_refused -= read.was_refused
            try:
                block = future.result()
            except Exception as exc:  # any error is this adapter's own
                finished.append((key, exc))
                continue
            if block is None:
                self._queued[key] = _Read(key, read.path, was_refused=True)
                self._num_refused += 1
                self._blocked = self._soonest()
            else:
                finished.append((key, block))
        if any(isinstance(result, Exception) for _, result in finished):
            self.look_again()
        return finished
