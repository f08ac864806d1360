"""Host memory of all ranks. Rank 0 decides what is in it, and where."""

from __future__ import annotations

from pathlib import Path
from threading import Lock

import torch

from ...adapters.block_reader import Prepare
from ...adapters.extents import Extent
from ...adapters.host_cache import HostBlock, HostCache
from ...adapters.identity import AdapterKey
from ...adapters.layout_part import LayoutPart
from ...adapters.loaders import Pace
from .commands import DropAdapters, ReadAdapter
from .followers import Followers, Jobs


class LeaderHostCache(HostCache):
    """Rank 0's host cache, which the followers' memory mirrors, extent by extent.

    Followers drop what rank 0 has dropped before they read another block to its extent, because
    they do these jobs in the order of the commands.
    """

    def __init__(
        self,
        followers: Followers,
        part: LayoutPart,
        capacity_bytes: int,
        dtype: torch.dtype,
        *,
        prepare: Prepare,
        pace: Pace,
    ) -> None:
        """See `HostCache`."""
        super().__init__(part.whole, capacity_bytes, dtype, prepare=prepare, pace=pace, part=part)
        self._followers = followers
        self._mirrored: dict[AdapterKey, Extent] = {}
        """The blocks that the followers hold."""
        self._telling = Lock()

    def read(self, key: AdapterKey, path: Path) -> HostBlock | None:
        """See `HostCache.read`; returns when every rank has its part. Raises RankLost too."""
        block = super().read(key, path)
        if block is None:
            return None
        with self._telling:
            if gone := self._take_gone():
                self._begin_drop(gone)
            self._mirrored[key] = block.extent
            read = self._followers.begin(lambda job: ReadAdapter(job, key, str(path), block.extent))
        try:
            read.wait()
        except BaseException:
            self.remove(key)
            raise
        return block

    def remove(self, key: AdapterKey) -> None:
        """See `HostCache.remove`; on every rank. Raises RankLost."""
        super().remove(key)
        with self._telling:
            # Also if it was dropped before: the followers' zeroing may not have ended.
            dropped = self._begin_drop({key, *self._take_gone()})
        dropped.wait()

    def _take_gone(self) -> set[AdapterKey]:
        """The mirrored blocks that are no longer in their place here."""
        held = self.extents()
        gone = {key for key, extent in self._mirrored.items() if held.get(key) != extent}
        for key in gone:
            del self._mirrored[key]
        return gone

    def _begin_drop(self, keys: set[AdapterKey]) -> Jobs:
        return self._followers.begin(lambda job: DropAdapters(job, tuple(keys)))
