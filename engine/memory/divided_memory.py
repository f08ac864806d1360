"""The device memory that KV blocks and adapters divide, where the border between them moves.

KV blocks lie at the beginning, adapters at the end, and each grows towards the other. No address
changes when the border moves: captured graphs keep theirs.

    | null block | block 1 | block 2 ...  →        ←  ... adapters | spare block |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kv.block_memory import BlockMemory
from ..kv.layout import KvGroup
from .budget import Bounds

ARENA_ALIGNMENT_BYTES = 256
"""As of memory of its own on CUDA."""


class DividedMemory(NamedTuple):
    """Views of one allocation. Bytes that both have belong to one of them at a time."""

    blocks: BlockMemory
    """Its last block is spare, if one was asked for: the arena never has it."""
    arena: Tensor
    """uint8: what adapters can have. What they have now is at its end."""


def open_divided_memory(
    bounds: Bounds | None,
    groups: Sequence[KvGroup],
    block_bytes: Sequence[int],
    *,
    has_spare_block: bool,
    device: torch.device,
) -> DividedMemory | None:
    """The memory of the group that gives its end and of adapters; None: each has its own.

    `block_bytes`: of a block of each group. Ranks whose blocks differ in size use the largest, so
    that all divide their memory alike.
    """
    for group, size in zip(groups, block_bytes, strict=True):
        if bounds is not None and group.gives_end:
            return divide_memory(bounds, size, has_spare_block=has_spare_block, device=device)
    return None


def divide_memory(
    bounds: Bounds, block_bytes: int, *, has_spare_block: bool, device: torch.device
) -> DividedMemory:
    """Allocate zeros for what the bounds let both sides have, and the null block."""
    start = block_bytes + bounds.least_kv
    start = -(-start // ARENA_ALIGNMENT_BYTES) * ARENA_ALIGNMENT_BYTES
    end = start + bounds.most_adapters
    num_blocks = -(-end // block_bytes) + has_spare_block
    memory = torch.zeros(num_blocks * block_bytes, dtype=torch.uint8, device=device)
    return DividedMemory(BlockMemory(memory, block_bytes), memory[start:end])
