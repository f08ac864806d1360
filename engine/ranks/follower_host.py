"""A follower's host memory: what is in it, and where, is rank 0's decision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ...adapters.block_files import BlockFiles
from ...adapters.block_reader import BlockReader
from ...adapters.extents import Extent
from ...adapters.host_cache import HostBlock
from ...adapters.identity import AdapterKey
from ...adapters.untouched import untouched_zeros


class FollowerHost:
    """Blocks in one pool. One thread reads and drops them; others may look them up."""

    def __init__(
        self,
        reader: BlockReader,
        capacity_bytes: int,
        dtype: torch.dtype,
        *,
        page_locked: bool,
    ) -> None:
        """`capacity_bytes`, `page_locked`: those of rank 0's host cache."""
        self._reader = reader
        num_elements = capacity_bytes // dtype.itemsize
        self.pool = (
            torch.zeros(num_elements, dtype=dtype, pin_memory=True)
            if page_locked
            else untouched_zeros(num_elements, dtype)
        )
        """What no block holds is zero."""
        self._blocks: dict[AdapterKey, HostBlock] = {}

    def __getitem__(self, key: AdapterKey) -> HostBlock:
        return self._blocks[key]

    @property
    def used_bytes(self) -> int:
        """Bytes of all blocks that are held."""
        return sum(block.tensor.nbytes for block in self.blocks())

    def blocks(self) -> list[HostBlock]:
        """All blocks that are held."""
        return list(self._blocks.values())

    def read(self, key: AdapterKey, paths: Sequence[Path], extent: Extent) -> None:
        """Read a block to a free extent; `paths`: the files of `key.parts`. Raises as `BlockFiles`
        and `BlockReader` do, and OSError."""
        files = BlockFiles.open(key, paths)
        plan = self._reader.plan(files)
        tensor = self.pool[extent.offset : extent.offset + plan.num_elements]
        try:
            self._reader.fill(tensor, files, plan)
        except BaseException:
            tensor.zero_()
            raise
        self._blocks[key] = HostBlock(
            key, tensor, plan.table, plan.placed_auxiliary, extent, plan.vocab_size
        )

    def drop(self, keys: Sequence[AdapterKey]) -> None:
        """Zero these blocks; unknown ones are ignored."""
        for key in keys:
            if (block := self._blocks.pop(key, None)) is not None:
                block.tensor.zero_()
