"""Extents that nothing refers to any more: they are free once their bytes are zero."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic

from .extents import Extent, Placement
from .identity import AdapterKey
from .loaders import Loaders
from .memories import BlockT, DeviceArena


@dataclass
class _Erasure:
    key: AdapterKey
    placement: Placement
    job: Future[None]


class Erasures(Generic[BlockT]):
    """One that fails begins again: bytes that are not zero are never free."""

    def __init__(self, arena: DeviceArena[BlockT], loaders: Loaders) -> None:
        self._arena = arena
        self._loaders = loaders
        self.running: list[_Erasure] = []
        """The erasures that `poll` has not completed."""

    def begin(self, key: AdapterKey, placement: Placement) -> None:
        """Retire a placement of this adapter, then zero it."""
        self._arena.retire(placement)
        self.running.append(_Erasure(key, placement, self._submit(placement)))

    def poll(self) -> bool:
        """Free the extents that were zeroed; True if something changed."""
        finished = [erasure for erasure in self.running if erasure.job.done()]
        for erasure in finished:
            if erasure.job.exception() is None:
                self.running.remove(erasure)
                self._arena.free(erasure.placement)
            else:
                erasure.job = self._submit(erasure.placement)
        return bool(finished)

    def is_erasing(self, key: AdapterKey) -> bool:
        """Whether bytes of this adapter are still to be zeroed."""
        return any(erasure.key == key for erasure in self.running)

    def extents(self) -> list[Extent]:
        return [erasure.placement.extent for erasure in self.running]

    def _submit(self, placement: Placement) -> Future[None]:
        num_bytes = placement.extent.size * self._arena.element_bytes
        return self._loaders.submit(num_bytes, self._arena.erase, placement)
