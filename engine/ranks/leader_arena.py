"""The arenas of all ranks. Rank 0 decides every place.

The followers' extents lie at the same offsets, because each rank's part of a block has the same
size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...adapters.arena import Arena
from ...adapters.block import PlacedExtra
from ...adapters.extents import Extent, Placement
from ...adapters.host_cache import HostBlock
from ...adapters.identity import AdapterKey
from ...adapters.layout import BaseLayout
from ...adapters.loaders import Pace
from .commands import (
    CopyAdapter,
    EraseExtent,
    FreePlace,
    MoveAdapter,
    PlaceAdapter,
    PlaceAgain,
    PublishAdapter,
    ResizeArena,
    RetireAdapter,
)
from .followers import Followers


class LeaderArena(Arena):
    """Rank 0's arena. What it does, every follower's arena does. Each method raises RankLost."""

    def __init__(
        self,
        followers: Followers,
        layout: BaseLayout,
        capacity_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        pace: Pace,
        reserved_bytes: int,
        memory: Tensor | None,
    ) -> None:
        """See `Arena`."""
        super().__init__(
            *(layout, capacity_bytes, dtype, device),
            pace=pace,
            reserved_bytes=reserved_bytes,
            memory=memory,
        )
        self._followers = followers

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        self._followers.tell(ResizeArena(self.capacity))

    def place(
        self,
        key: AdapterKey,
        num_elements: int,
        block_table: npt.NDArray[np.int64],
        auxiliary: Sequence[PlacedExtra] = (),
        *,
        vocab_size: int | None = None,
        avoid: Sequence[Extent] = (),
    ) -> Placement | None:
        placement = super().place(
            key, num_elements, block_table, auxiliary, vocab_size=vocab_size, avoid=avoid
        )
        if placement is not None:
            self._followers.tell(PlaceAdapter(key, placement))
        return placement

    def place_again(self, row: int, *, avoid: Sequence[Extent] = ()) -> Placement | None:
        placement = super().place_again(row, avoid=avoid)
        if placement is not None:
            self._followers.tell(PlaceAgain(row, placement))
        return placement

    def copy_into(self, placement: Placement, block: HostBlock) -> None:
        copied = self._followers.begin(lambda job: CopyAdapter(job, block.key, placement))
        super().copy_into(placement, block)
        copied.wait()

    def copy_between(self, source: Placement, target: Placement) -> None:
        moved = self._followers.begin(lambda job: MoveAdapter(job, source, target))
        super().copy_between(source, target)
        moved.wait()

    def publish(self, placement: Placement) -> None:
        super().publish(placement)
        self._followers.tell(PublishAdapter(placement))

    def retire(self, placement: Placement) -> None:
        super().retire(placement)
        self._followers.tell(RetireAdapter(placement))

    def erase(self, placement: Placement) -> None:
        erased = self._followers.begin(lambda job: EraseExtent(job, placement))
        super().erase(placement)
        erased.wait()

    def free(self, placement: Placement) -> None:
        super().free(placement)
        self._followers.tell(FreePlace(placement))
