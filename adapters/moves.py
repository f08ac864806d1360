"""Copies idle adapters to other extents of the arena, to join free extents."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Generic, NamedTuple

from .erasures import Erasures
from .extents import Extent, Placement
from .loaders import Loaders
from .memories import BlockT, DeviceArena
from .record import Record


class _Move(NamedTuple, Generic[BlockT]):
    record: Record[BlockT]
    target: Placement
    job: Future[None]


class Moves(Generic[BlockT]):
    """A moving adapter occupies both extents; the old one is zeroed afterwards."""

    def __init__(
        self, arena: DeviceArena[BlockT], loaders: Loaders, erasures: Erasures[BlockT]
    ) -> None:
        self._arena = arena
        self._loaders = loaders
        self._erasures = erasures
        self.running: list[_Move[BlockT]] = []
        """The moves that `poll` has not completed."""
        self.num_moves = 0
        """Successful moves."""
        self.num_moved_elements = 0
        """Elements of the arena moved."""

    def begin(self, record: Record[BlockT], avoid: Sequence[Extent]) -> None:
        """Start copying an idle adapter to another extent. Without room for the copy nothing
        starts, and the planner evicts the adapter."""
        source = record.placement
        assert source is not None
        target = self._arena.place_again(source.row, avoid=avoid)
        if target is None:
            return
        record.is_moving = True
        num_bytes = source.extent.size * self._arena.element_bytes
        job = self._loaders.submit(num_bytes, self._arena.copy_between, source, target)
        self.running.append(_Move(record, target, job))

    def poll(self) -> bool:
        """Complete the moves whose copies have ended; True if something changed."""
        finished = [move for move in self.running if move.job.done()]
        for move in finished:
            self.running.remove(move)
            self._end(move)
        return bool(finished)

    def targets(self) -> list[Extent]:
        return [move.target.extent for move in self.running]

    def _end(self, move: _Move[BlockT]) -> None:
        record, source = move.record, move.record.placement
        assert source is not None
        record.is_moving = False
        if move.job.exception() is not None:
            self._erasures.begin(record.key, move.target)
            return
        self._arena.publish(move.target)
        record.placement = move.target
        self._erasures.begin(record.key, source)
        self.num_moves += 1
        self.num_moved_elements += move.target.extent.size
