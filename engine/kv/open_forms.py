"""The vectors of open blocks, for formats that quantize complete blocks.

`kernels/kv_groups.py` explains the two forms of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.kv_groups import NOT_OPEN, OpenBlocks, block_bytes, stack_grouped_pages
from ...kernels.kv_pages import KvPages
from ..transfers import to_device
from .groups import LayerKvShape
from .layout import KvGroup


class OpenForms:
    """The open blocks of one KV group, in all of its layers."""

    def __init__(self, blocks: OpenBlocks, device: torch.device) -> None:
        self.blocks = blocks
        self.tensors: list[Tensor] = []
        """`[layers, num_slots + 1, block_size, num_heads, dim]` each."""
        self._device = device

    def zero(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Open blocks in these slots, if any are given, and zero them."""
        if slots:
            self.blocks.open(block_ids, slots)
        held = [slot for slot in map(self.blocks.slot, block_ids) if slot != NOT_OPEN]
        index = to_device(held, self._device, torch.int64)
        for tensor in self.tensors:
            tensor.index_fill_(1, index, 0)

    def copy(self, source: int, target: int, slot: int | None) -> None:
        """Open the target in this slot, if one is given, with the source's vectors."""
        if slot is not None:
            self.blocks.open([target], [slot])
        read, written = self.blocks.slot(source), self.blocks.slot(target)
        if NOT_OPEN in (read, written):
            return
        for tensor in self.tensors:
            tensor[:, written] = tensor[:, read]

    def clear(self, block_id: int, offset: int) -> None:
        """Zero a token of an open block."""
        slot = self.blocks.slot(block_id)
        assert slot != NOT_OPEN, "a complete block is not cleared"
        for tensor in self.tensors:
            tensor[:, slot, offset] = 0


class GroupedLayers(NamedTuple):
    """The pages of one KV group's layers."""

    keys: dict[int, KvPages]
    """By layer."""
    values: dict[int, KvPages]
    tensors: list[Tensor]
    """`[layers, num_blocks, ...]` each: the blocks as codes."""
    open: OpenForms


def make_grouped_layers(
    group: KvGroup,
    shapes: Sequence[LayerKvShape],
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    bits: int,
    num_open_slots: int | None,
    device: torch.device,
) -> GroupedLayers:
    """Pages of zeros; `num_open_slots` as in KvCache."""
    opened = OpenForms(OpenBlocks(num_blocks, num_open_slots, device), device)
    made = GroupedLayers({}, {}, [], opened)
    for is_key, pages in ((True, made.keys), (False, made.values)):
        layers_by_size: dict[tuple[int, int], list[int]] = {}
        for layer in group.layers:
            shape = shapes[layer]
            dim = shape.key_dim if is_key else shape.value_dim
            layers_by_size.setdefault((shape.num_heads, dim), []).append(layer)
        for size, layers in layers_by_size.items():
            stack = stack_grouped_pages(
                len(layers),
                (num_blocks, block_size, *size),
                dtype=dtype,
                bits=bits,
                is_key=is_key,
                blocks=opened.blocks,
                device=device,
            )
            pages.update(zip(layers, stack.pages, strict=True))
            made.tensors.extend(stack.tensors)
            opened.tensors.append(stack.opened)
    return made


def grouped_bytes_per_block(
    group: KvGroup, shapes: Sequence[LayerKvShape], *, block_size: int, bits: int
) -> int:
    """Bytes of one block over the group's layers, without its open form."""
    return sum(
        block_bytes(block_size, shape.num_heads, dim, bits=bits, is_key=is_key)
        for shape in (shapes[layer] for layer in group.layers)
        for is_key, dim in ((True, shape.key_dim), (False, shape.value_dim))
    )
