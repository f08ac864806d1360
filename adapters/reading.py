"""Reads local block files into host memory, the most urgent first.

A read that finds no room is retried when room is freed. While such a read is pending, reads run one
at a time and no less urgent read overtakes it, so small adapters cannot starve a large one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic

from .identity import AdapterKey
from .loaders import Loaders
from .memories import BlockT, Host
from .next_use import NextUseRank
from .record import Record

MAX_SUBMITTED = 2
"""The number of reads, and of copies to the device, that are submitted to the loader threads at a
time. The threads take jobs in order, so a job that is not submitted yet can be overtaken by a more
urgent one."""


@dataclass
class _Read(Generic[BlockT]):
    record: Record[BlockT]
    was_refused: bool = False
    """Host memory was full of blocks in use."""


class ReadQueue(Generic[BlockT]):
    """Not thread-safe: its owner calls it, the loader threads only run `host.read`."""

    def __init__(
        self, host: Host[BlockT], loaders: Loaders, rank: Callable[[Record[Any]], NextUseRank]
    ) -> None:
        self._host = host
        self._loaders = loaders
        self._rank = rank
        self._queued: dict[AdapterKey, _Read[BlockT]] = {}
        self._running: dict[AdapterKey, tuple[_Read[BlockT], Future[BlockT | None]]] = {}
        self._num_refused = 0
        """The number of waiting and running reads that found no room before."""
        self._blocked: Record[BlockT] | None = None

    def __len__(self) -> int:
        return len(self._queued) + len(self._running)

    @property
    def blocked(self) -> Record[BlockT] | None:
        """The record of the most urgent read, if it waits for room in host memory; else None."""
        return self._blocked

    def is_running(self, key: AdapterKey) -> bool:
        return key in self._running

    def add(self, record: Record[BlockT]) -> None:
        """Read the files at the record's paths."""
        self._queued[record.key] = _Read(record)
        if self._blocked is not None and self._rank(record) < self._rank(self._blocked):
            self.look_again()

    def discard(self, key: AdapterKey) -> None:
        """Remove a read that has not started."""
        read = self._queued.pop(key, None)
        if read is not None:
            self._num_refused -= read.was_refused
            self.look_again()

    def look_again(self) -> None:
        """Host memory was freed, or another read is now the most urgent."""
        self._blocked = None

    def reorder(self) -> None:
        """The order of urgency has changed."""
        if self._blocked is not None and self._soonest() is not self._blocked:
            self.look_again()

    def start(self) -> None:
        """Start the most urgent reads that may run now, up to the concurrency limit."""
        if not self._queued or self._blocked is not None or len(self._running) >= MAX_SUBMITTED:
            return
        for read in sorted(self._queued.values(), key=lambda read: self._rank(read.record)):
            if len(self._running) >= MAX_SUBMITTED or (self._num_refused and self._running):
                return
            del self._queued[read.record.key]
            self._running[read.record.key] = read, self._begin(read.record)

    def take_finished(self) -> list[tuple[Record[BlockT], BlockT | Exception]]:
        """The blocks that arrived, in use, and the errors of the reads that failed."""
        finished: list[tuple[Record[BlockT], BlockT | Exception]] = []
        for key, (read, future) in list(self._running.items()):
            if not future.done():
                continue
            del self._running[key]
            self._num_refused -= read.was_refused
            result = _result_of(future)
            if result is None:
                self._refuse(read.record)
            else:
                finished.append((read.record, result))
        if any(isinstance(result, Exception) for _, result in finished):
            self.look_again()
        return finished

    def _begin(self, record: Record[BlockT]) -> Future[BlockT | None]:
        block = self._host.acquire(record.key)
        if block is None:
            num_bytes = sum(map(self._host.size_on_disk, record.paths))
            return self._loaders.submit(num_bytes, self._host.read, record.key, *record.paths)
        cached: Future[BlockT | None] = Future()
        cached.set_result(block)
        return cached

    def _refuse(self, record: Record[BlockT]) -> None:
        self._queued[record.key] = _Read(record, was_refused=True)
        self._num_refused += 1
        self._blocked = self._soonest()

    def _soonest(self) -> Record[BlockT]:
        return min((read.record for read in self._queued.values()), key=self._rank)


def _result_of(future: Future[BlockT | None]) -> BlockT | Exception | None:
    try:
        return future.result()
    except Exception as exc:  # any error fails this adapter only
        return exc
