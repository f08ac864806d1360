"""Memory in which a block is one range of addresses.

The parts that a block has of every tensor of its KV group lie together, so that others can have the
memory of a block while its neighbours stay.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNIT_BYTES = 16
"""Parts begin at multiples of it, for wide loads."""


class BlockMemory:
    """Blocks one after another, from the beginning of a memory on."""

    def __init__(self, memory: Tensor, block_bytes: int) -> None:
        """`memory`: uint8, zeros, whole blocks. `block_bytes`: a multiple of UNIT_BYTES."""
        assert block_bytes % UNIT_BYTES == 0, "the parts of every block are aligned"
        self.num_blocks, rest = divmod(memory.numel(), block_bytes)
        assert rest == 0, "the memory is divided into whole blocks"
        self._memory, self._block_bytes = memory, block_bytes
        self._num_taken = 0
        """Bytes of each block."""

    def take(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """`[count, num_blocks, ...]`: the next bytes of every block, as a tensor of this size."""
        count, num_blocks, *block = size
        assert num_blocks == self.num_blocks, "every tensor has a part of every block"
        of_block = torch.empty((count, *block), dtype=dtype, device="meta")
        elements = self._memory.view(dtype)
        start = elements.storage_offset() + self._num_taken // dtype.itemsize
        self._num_taken += -(-of_block.nbytes // UNIT_BYTES) * UNIT_BYTES
        assert self._num_taken <= self._block_bytes, "the parts fit into a block"
        strides = of_block.stride()
        return elements.as_strided(
            size, (strides[0], self._block_bytes // dtype.itemsize, *strides[1:]), start
        )
