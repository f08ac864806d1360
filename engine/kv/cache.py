"""The tensors of the KV blocks, on the device and in swap space."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, assert_never

import numpy as np
import torch
from torch import Tensor

from ...kernels.kv_pages import KeyPrefix, KvPages, stack_pages, vector_bytes
from ..config import KvDtype
from ..errors import UnsupportedModel
from ..transfers import to_device
from .groups import LayerKvShape
from .layout import CopyBlock, KvGroup, KvOperation, SwapIn, SwapOut, ZeroBlocks
from .sequence_blocks import BlockTable

_MIN_FP8_CAPABILITY = (8, 9)


class KvFormat(NamedTuple):
    """The storage format of keys and values."""

    dtype: torch.dtype
    """The dtype that attention reads."""
    code_dtype: torch.dtype | None = None
    """The dtype of quantized values, with a scale per token and head; None: `dtype` without
    quantization."""


def choose_kv_format(kv_dtype: KvDtype, *, dtype: torch.dtype, device: torch.device) -> KvFormat:
    """Raises UnsupportedModel if the device does not compute the format."""
    match kv_dtype:
        case KvDtype.AUTO:
            return KvFormat(dtype)
        case KvDtype.INT8:
            return KvFormat(dtype, torch.int8)
        case KvDtype.FP8:
            has_fp8 = device.type == "cuda" and (
                torch.cuda.get_device_capability(device) >= _MIN_FP8_CAPABILITY
            )
            if not has_fp8:
                raise UnsupportedModel(
                    f"--kv-dtype fp8 is not supported on this device ({device.type}); use int8"
                )
            return KvFormat(dtype, torch.float8_e4m3fn)
        case _:
            assert_never(kv_dtype)


class KvCache:
    """The pages of keys and of values, per layer. A layer has as many blocks as its group."""

    def __init__(
        self,
        groups: Sequence[KvGroup],
        shapes: Sequence[LayerKvShape],
        *,
        block_size: int,
        kv_format: KvFormat,
        device: torch.device,
        num_swap_slots: Sequence[int] = (),
        has_spare_blocks: bool = False,
    ) -> None:
        """`num_swap_slots`: blocks of host memory per group; empty: none. `has_spare_blocks`: each
        group has one additional block, to which padding writes."""
        self.groups = tuple(groups)
        self.block_size = block_size
        self.group_of = {
            layer: index for index, group in enumerate(groups) for layer in group.layers
        }
        self.windows = [shape.window for shape in shapes]
        """By layer: the model's own attention window."""
        self._device = device
        self._tensors: list[list[Tensor]] = []
        """By group: `[layers, num_blocks, ...]` each, the keys or values of several layers."""
        pages: dict[_Part, KvPages] = {}
        for group in groups:
            tensors: list[Tensor] = []
            for (num_heads, dim), parts in _parts_by_size(group, shapes).items():
                stack = stack_pages(
                    len(parts),
                    (group.num_blocks + has_spare_blocks, block_size, num_heads, dim),
                    dtype=kv_format.dtype,
                    code_dtype=kv_format.code_dtype,
                    device=device,
                )
                pages.update(zip(parts, stack.pages, strict=True))
                tensors += stack.tensors
            self._tensors.append(tensors)
        self.keys = [pages[_Part(layer, is_key=True)] for layer in range(len(shapes))]
        self.values = [
            KeyPrefix(self.keys[layer], shape.value_dim)
            if shape.is_latent
            else pages[_Part(layer, is_key=False)]
            for layer, shape in enumerate(shapes)
        ]
        self._host_tensors = [
            [_host_tensor(tensor, slots) for tensor in tensors]
            for tensors, slots in zip(self._tensors, num_swap_slots, strict=bool(num_swap_slots))
        ]

    @property
    def spare_blocks(self) -> list[int]:
        """The spare block of each group, if the cache has them."""
        return [group.num_blocks for group in self.groups]

    def clear(self, tables: Sequence[BlockTable], start: int, end: int) -> None:
        """Zero positions `[start, end)` of the sequence with these blocks, by group."""
        for table, tensors in zip(tables, self._tensors, strict=True):
            for position in range(start, end):
                block, offset = divmod(position, self.block_size)
                for tensor in tensors:
                    tensor[:, table.item(block), offset] = 0

    def move(
        self, tables: Sequence[BlockTable], sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        """Copy the entries of positions `sources` to `targets` in the sequence with these blocks,
        as if all were read before any is written."""
        for table, tensors in zip(tables, self._tensors, strict=True):
            read, written = (self._slots(table, positions) for positions in (sources, targets))
            for tensor in tensors:
                slots = tensor.flatten(1, 2)
                slots[:, written] = slots[:, read]

    def execute(self, operations: Sequence[KvOperation]) -> None:
        """Execute the operations that the scheduler's bookkeeping has queued, strictly in order.

        The order matters: a block may be copied or swapped out and then zeroed for a new owner
        within one step.
        """
        for operation in operations:
            match operation:
                case ZeroBlocks(group, block_ids):
                    self._zero(group, block_ids)
                case CopyBlock(group, source, target):
                    for tensor in self._tensors[group]:
                        tensor[:, target] = tensor[:, source]
                case SwapOut(group, block_ids, host_slots):
                    self._swap_out(group, block_ids, host_slots)
                case SwapIn(group, host_slots, block_ids):
                    self._swap_in(group, host_slots, block_ids)
                case _:
                    assert_never(operation)

    def _zero(self, group: int, block_ids: Sequence[int]) -> None:
        """Zero blocks that have a new owner.

        No sequence may read another tenant's values, and the unwritten rest of a block must be
        finite, because masked positions enter sums with weight zero.
        """
        index = self._index(block_ids)
        for tensor in self._tensors[group]:
            tensor.index_fill_(1, index, 0)

    def _swap_out(self, group: int, block_ids: Sequence[int], host_slots: Sequence[int]) -> None:
        index, slots = self._index(block_ids), torch.tensor(host_slots, dtype=torch.int64)
        pairs = zip(self._tensors[group], self._host_tensors[group], strict=True)
        for tensor, host in pairs:
            host.index_copy_(1, slots, tensor.index_select(1, index).cpu())

    def _swap_in(self, group: int, host_slots: Sequence[int], block_ids: Sequence[int]) -> None:
        index, slots = self._index(block_ids), torch.tensor(host_slots, dtype=torch.int64)
        pairs = zip(self._tensors[group], self._host_tensors[group], strict=True)
        for tensor, host in pairs:
            tensor.index_copy_(1, index, to_device(host.index_select(1, slots), self._device))

    def _slots(self, table: BlockTable, positions: Sequence[int]) -> Tensor:
        blocks, offsets = np.divmod(positions, self.block_size)
        return to_device(table[blocks] * self.block_size + offsets, self._device)

    def _index(self, block_ids: Sequence[int]) -> Tensor:
        return to_device(block_ids, self._device, torch.int64)


class _Part(NamedTuple):
    """A layer's keys or values."""

    layer: int
    is_key: bool


def _parts_by_size(
    group: KvGroup, shapes: Sequence[LayerKvShape]
) -> dict[tuple[int, int], list[_Part]]:
    """The parts of the group's layers by their number of heads and dimension."""
    parts: defaultdict[tuple[int, int], list[_Part]] = defaultdict(list)
    for layer in group.layers:
        shape = shapes[layer]
        for is_key, dim in zip((True, False), shape.stored_dims, strict=False):
            parts[shape.num_heads, dim].append(_Part(layer, is_key))
    return parts


def _host_tensor(like: Tensor, num_slots: int) -> Tensor:
    # Never read before written, so the memory is not touched before it is needed.
    size = (len(like), num_slots, *like.shape[2:])
    return torch.empty(size, dtype=like.dtype, pin_memory=like.is_cuda)


def kv_bytes_per_block(
    group: KvGroup, shapes: Sequence[LayerKvShape], *, block_size: int, kv_format: KvFormat
) -> int:
    """Bytes of one block over the group's layers."""
    dtype, code_dtype = kv_format
    per_token = sum(
        shapes[layer].num_heads * vector_bytes(dim, dtype=dtype, code_dtype=code_dtype)
        for layer in group.layers
        for dim in shapes[layer].stored_dims
    )
    return per_token * block_size
