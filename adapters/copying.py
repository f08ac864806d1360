"""Copies of placed blocks to the device, the most urgent first."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic

from .identity import AdapterKey
from .loaders import Loaders
from .memories import BlockT, DeviceArena
from .next_use import NextUseRank
from .reading import MAX_SUBMITTED
from .record import Record


class CopyQueue(Generic[BlockT]):
    """The queued and running copies. A more urgent copy may overtake those that have not
    started."""

    def __init__(
        self,
        arena: DeviceArena[BlockT],
        loaders: Loaders,
        rank: Callable[[Record[Any]], NextUseRank],
    ) -> None:
        self._arena = arena
        self._loaders = loaders
        self._rank = rank
        self._queued: dict[AdapterKey, Record[BlockT]] = {}
        self._running: dict[AdapterKey, tuple[Record[BlockT], Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._queued) + len(self._running)

    def is_running(self, key: AdapterKey) -> bool:
        return key in self._running

    def add(self, record: Record[BlockT]) -> None:
        """Copy the record's block to its placement."""
        self._queued[record.key] = record

    def discard(self, key: AdapterKey) -> None:
        """Remove a copy that has not started."""
        self._queued.pop(key, None)

    def start(self) -> None:
        """Start the most urgent copies, up to the concurrency limit."""
        room = max(MAX_SUBMITTED - len(self._running), 0)
        for record in sorted(self._queued.values(), key=self._rank)[:room]:
            del self._queued[record.key]
            self._running[record.key] = record, self._begin(record)

    def take_finished(self) -> list[tuple[Record[BlockT], BaseException | None]]:
        """The records whose copies have ended, each with its error if it failed."""
        finished = [entry for entry in self._running.values() if entry[1].done()]
        for record, _ in finished:
            del self._running[record.key]
        return [(record, copy.exception()) for record, copy in finished]

    def _begin(self, record: Record[BlockT]) -> Future[None]:
        assert record.placement is not None
        assert record.block is not None
        num_bytes = record.num_placed * self._arena.element_bytes
        return self._loaders.submit(
            num_bytes, self._arena.copy_into, record.placement, record.block
        )
