"""Host memory of all ranks. Rank 0 decides what is in it, and where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from ...adapters.block import BlockPlan
from ...adapters.block_files import BlockFiles
from ...adapters.block_reader import Prepare
from ...adapters.extents import Extent
from ...adapters.host_cache import HostBlock, HostCache
from ...adapters.identity import AdapterKey
from ...adapters.layout_part import LayoutPart
from ...adapters.loaders import Pace
from ..model.row_magnitudes import RowMagnitudes, Squares
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
        parts: Sequence[Sequence[LayoutPart]],
        capacity_bytes: int,
        dtype: torch.dtype,
        *,
        page_locked: bool,
        prepare: Prepare,
        magnitudes: RowMagnitudes,
        pace: Pace,
    ) -> None:
        """See `HostCache`. `parts`: what each rank of each stage holds, this one's being the first
        of the last stage. `magnitudes`: what `prepare` leaves to all ranks of a stage together."""
        own = parts[-1][0]
        super().__init__(
            own.whole,
            capacity_bytes,
            dtype,
            page_locked=page_locked,
            prepare=prepare,
            pace=pace,
            part=own,
        )
        self._followers = followers
        self._parts = parts
        self._magnitudes = magnitudes
        self._mirrored: dict[AdapterKey, Extent] = {}
        """The blocks that the followers hold."""
        self._telling = Lock()

    def read(self, key: AdapterKey, *paths: Path) -> HostBlock | None:
        """See `HostCache.read`; returns when every rank has its part. Raises RankLost too."""
        block = super().read(key, *paths)
        if block is None:
            return None
        with self._telling:
            if gone := self._take_gone():
                self._begin_drop(gone)
            self._mirrored[key] = block.extent
            read = self._followers.begin(
                lambda job: ReadAdapter(job, key, tuple(map(str, paths)), block.extent)
            )
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

    def _size(self, files: BlockFiles, plan: BlockPlan) -> int:
        """Extents are the same on every rank, so each has room for the largest part."""
        plans = (
            part.plan(files.ranks, files.auxiliary) for of_stage in self._parts for part in of_stage
        )
        return max(each.num_elements for each in plans)

    def _complete(self, block: HostBlock, answers: Sequence[JobDone]) -> None:
        """Complete the magnitudes of a block on every rank; the sums are in rank order.

        `answers`: of all followers. Each stage has magnitudes of its own layers.
        """
        own = tuple(each.tobytes() for each in self._magnitudes.squares(block))
        of_ranks = [own, *(answer.squares for answer in answers)]
        if not any(of_ranks):
            return
        size = len(of_ranks) // len(self._parts)
        of_stages = [
            _sums(of_ranks[first : first + size]) for first in range(0, len(of_ranks), size)
        ]
        packed = tuple(tuple(each.tobytes() for each in sums) for sums in reversed(of_stages))
        completed = self._followers.begin(lambda job: CompleteAdapter(job, block.key, packed))
        self._magnitudes.complete(block, of_stages[0])
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


def _sums(of_ranks: Sequence[tuple[bytes, ...]]) -> list[Squares]:
    """The sums of the squares of a stage's ranks."""
    unpacked = [[np.frombuffer(each, dtype=np.float64) for each in own] for own in of_ranks]
    return [np.sum(of_magnitude, axis=0) for of_magnitude in zip(*unpacked, strict=True)]
