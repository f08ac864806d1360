"""The tensors behind the KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class LayerKvShape(NamedTuple):
    """What one token's keys and values take in one layer; `key_dim` and `value_dim` may differ."""

    num_heads: int
    key_dim: int
    value_dim: int


class KvCache:
    """Per layer a key cache and a value cache, `[num_blocks, block_size, heads, dim]`."""

    def __init__(
        self,
        shapes: Sequence[LayerKvShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.device = device
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for shape in shapes:
            size = (num_blocks, block_size, shape.num_heads)
            self.keys.append(torch.zeros(*size, shape.key_dim, dtype=dtype, device=device))
            self.values.append(torch.zeros(*size, shape.value_dim, dtype=dtype, device=device))

    def zero(self, block_ids: Sequence[int]) -> None:
        """Clear blocks that have a new owner.

        Nobody may meet another tenant's values, and the unwritten rest of a block must be finite
        because masked positions still enter sums with weight zero.
        """
        if not block_ids:
            return
        index = torch.tensor(block_ids, dtype=torch.int64).to(self.device)
        for cache in (*self.keys, *self.values):
            cache.index_fill_(0, index, 0)


def kv_bytes_per_block(
    shapes: Sequence[LayerKvShape], *, block_size: int, dtype: torch.dtype
) -> int:
    """Bytes of one block over all layers."""
    per_token = sum(shape.num_heads * (shape.key_dim + shape.value_dim) for shape in shapes)
    return per_token * block_size * dtype.itemsize
