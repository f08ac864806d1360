"""Host memory of all ranks. Rank 0 decides what is in it, and where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from ...adapters.block_reader import Prepare
from ...adapters.extents import Extent
from ...adapters.host_cache import HostBlock, HostCache
from ...adapters.identity import AdapterKey
from ...adapters.layout_part import LayoutPart
from ...adapters.loaders import Pace
from ..model.row_magnitudes import RowMagnitudes
from .commands import CompleteAdapter, DropAdapters, JobDone, ReadAdapter
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
        magnitudes: RowMagnitudes,
        pace: Pace,
    ) -> None:
        """See `HostCache`. `magnitudes`: what `prepare` leaves to all ranks together."""
        super().__init__(part.whole, capacity_bytes, dtype, prepare=prepare, pace=pace, part=part)
        self._followers = followers
        self._magnitudes = magnitudes
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
            self._complete(block, read.wait())
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

    def _complete(self, block: HostBlock, answers: Sequence[JobDone]) -> None:
        """Complete the magnitudes of a block on every rank; the sums are in rank order."""
        squares = self._magnitudes.squares(block)
        if not squares:
            return
        for answer in answers:
            for whole, own in zip(squares, answer.squares, strict=True):
                whole += np.frombuffer(own, dtype=np.float64)
        packed = tuple(whole.tobytes() for whole in squares)
        completed = self._followers.begin(lambda job: CompleteAdapter(job, block.key, packed))
        self._magnitudes.complete(block, squares)
        completed.wait()

    def _take_gone(self) -> set[AdapterKey]:
        """The mirrored blocks that are no longer in their place here."""
        held = self.extents()
        gone = {key for key, extent in self._mirrored.items() if held.get(key) != extent}
        for key in gone:
            del self._mirrored[key]
        return gone

    def _begin_drop(self, keys: set[AdapterKey]) -> Jobs:
        return self._followers.begin(lambda job: DropAdapters(job, tuple(keys)))
