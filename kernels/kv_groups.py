"""Pages of codes of 4 or 2 bits, quantized in groups as in KIVI (Liu et al. 2024).

Keys have outlier channels, so each channel of a head is quantized over the tokens of a block.
Values have none, so each token of a head is quantized over groups of channels. Both are
asymmetric: a group stores its step and its smallest value.

A block has two forms. While its tokens may change, it is *open*: its vectors are also kept in the
model's dtype, in a slot of a second, small pool. The codes are computed from there whenever its
last token is written, so a draft token that is replaced leaves no trace.

A query reads its own block open and all blocks before it as codes. What it reads depends on
positions only, not on how its sequence was cut into steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .kv_pages import SCALE_DTYPE, GatherBuffer, KvPages, allocate_zeros

if TYPE_CHECKING:
    from .attention import AttentionBatch

VALUE_GROUP = 64
"""The most channels of a value that share a step."""
NOT_OPEN = -1
"""The slot of a block that is not open."""
SPARE_SLOT = 0
"""The slot of the spare block, to which padding writes. No other block is opened in it."""


class OpenBlocks:
    """The slots of the open blocks of one KV group, shared by its layers' pages.

    The host's copy answers the bookkeeping; kernels and captured graphs read `slots`.
    """

    def __init__(self, num_blocks: int, num_slots: int | None, device: torch.device) -> None:
        """`num_slots` None: every block is open forever."""
        self.num_blocks = num_blocks
        self.num_slots = num_blocks - 1 if num_slots is None else num_slots
        is_open = num_slots is None
        self._host = list(range(num_blocks)) if is_open else [NOT_OPEN] * num_blocks
        self.slots = torch.tensor(self._host, device=device)
        """int64 `[num_blocks]`, by block; always the same memory."""
        self._holders: dict[int, int] = {}
        self._last: tuple[Tensor, int, _Places] | None = None
        self.last_batch: tuple[AttentionBatch, AttentionBatch] | None = None
        """A step's attention and the same by blocks, see `attention_groups`."""

    def slot(self, block_id: int) -> int:
        return self._host[block_id]

    def open(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Give blocks these slots, which their holders until now have closed."""
        changed = list(block_ids)
        for block_id, slot in zip(block_ids, slots, strict=True):
            before = self._holders.get(slot)
            if before is not None and self.slot(before) == slot:
                self._host[before] = NOT_OPEN
                changed.append(before)
            self._host[block_id] = slot
            self._holders[slot] = block_id
        self._last = self.last_batch = None
        # Page-locked, so that the copy waits for no running step.
        pairs = torch.tensor(
            [changed, [self._host[block_id] for block_id in changed]],
            pin_memory=self.slots.is_cuda,
        ).to(self.slots.device, non_blocking=True)
        self.slots.index_copy_(0, *pairs)

    def slots_of(self, block_ids: Tensor) -> Tensor:
        """The slots of open blocks."""
        slots = self.slots[block_ids]
        is_open = bool((slots != NOT_OPEN).all())
        assert is_open, "a complete block is neither written nor read as an open one"
        return slots

    def readable(self, block_ids: Tensor) -> Tensor:
        """The ids under which `GroupedPages.gather` reads these open blocks as they were
        computed."""
        return self.slots_of(block_ids) + self.num_blocks

    def places(self, slots: Tensor, block_size: int) -> _Places:
        """Where tokens at these slots (block id x block size + offset) are written."""
        if self._last is None or self._last[0] is not slots or self._last[1] != block_size:
            block_ids = slots // block_size
            offsets = slots - block_ids * block_size
            complete = block_ids[offsets == block_size - 1]
            written = self.slots_of(block_ids) * block_size + offsets
            places = _Places(written, complete, self.slots_of(complete))
            self._last = slots, block_size, places
        return self._last[2]


class _Places(NamedTuple):
    """Where a step's tokens are written; the same in all layers of a group."""

    written: Tensor
    """int64 `[num_tokens]`: open slot x block size + offset."""
    complete: Tensor
    """int64: the blocks whose last token is written."""
    complete_slots: Tensor
    """int64: their open slots."""


class GroupedPages:
    """`KvPages` of one layer's keys, or of its values, as codes with open blocks."""

    def __init__(
        self, codes: Tensor, steps: Tensor, opened: Tensor, *, is_key: bool, blocks: OpenBlocks
    ) -> None:
        """`codes` uint8 `[num_blocks, block_size x bits / 8, num_heads, dim]`; `steps [num_blocks,
        *step_size(...)]`; `opened [num_slots + 1, block_size, num_heads, dim]`."""
        _, self.block_size, self.num_heads, self.dim = opened.shape
        self.data = codes
        self.scales: Tensor | None = steps
        self.tensors: tuple[Tensor, ...] = (codes, steps)
        self.opened = opened
        self.blocks = blocks
        self.bits = 8 * codes.shape[1] // self.block_size
        self.is_key = is_key

    def write(self, slots: Tensor, vectors: Tensor) -> None:
        """See `KvPages.write`; all blocks must be open."""
        places = self.blocks.places(slots, self.block_size)
        vectors = vectors.to(self.opened.dtype)
        self.opened.view(-1, self.num_heads, self.dim).index_copy_(0, places.written, vectors)
        if len(places.complete):
            blocks = self.opened[places.complete_slots]
            codes, steps = quantize_blocks(blocks, bits=self.bits, is_key=self.is_key)
            self.data.index_copy_(0, places.complete, codes)
            assert self.scales is not None
            self.scales.index_copy_(0, places.complete, steps)

    def gather(self, block_ids: Tensor, buffer: GatherBuffer | None = None) -> Tensor:
        """See `KvPages.gather`; ids of `OpenBlocks.readable` stand for open blocks."""
        buffer = buffer or GatherBuffer()
        ids = block_ids.flatten()
        is_open = ids >= self.blocks.num_blocks
        closed = ids.masked_fill(is_open, 0)
        assert self.scales is not None
        size = (len(ids), self.block_size, self.num_heads, self.dim)
        out = buffer.take(size, self.opened.dtype, ids.device)
        codes, scratch = buffer.take((2, len(ids), *self.data.shape[1:]), torch.uint8, ids.device)
        torch.index_select(self.data, 0, closed, out=codes)
        steps = self.scales.index_select(0, closed)
        dequantize_blocks(codes, steps, out, bits=self.bits, is_key=self.is_key, scratch=scratch)
        out[is_open] = self.opened[ids[is_open] - self.blocks.num_blocks]
        return out.view(*block_ids.shape, *size[1:])


def quantize_blocks(blocks: Tensor, *, bits: int, is_key: bool) -> tuple[Tensor, Tensor]:
    """The codes and steps of complete blocks `[n, block_size, num_heads, dim]`.

    A step is 1/15 of its group's range with 4 bits and 1/3 with 2, and the error of an element at
    most half a step. Step and smallest value are rounded outwards, so that a step may be longer by
    1/128, and by 1/128 of the smallest value divided by 15 or 3. A value that is not finite makes
    its group read as not finite.
    """
    groups = _in_groups(blocks.float(), is_key)
    axis = 1 if is_key else -1
    lowest = _rounded(groups.amin(axis, keepdim=True), -math.inf)
    largest = (1 << bits) - 1
    step = _rounded((groups.amax(axis, keepdim=True) - lowest.float()) / largest, math.inf)
    divisor = step.float().clamp(min=torch.finfo(torch.float32).tiny)
    codes = ((groups - lowest.float()) / divisor).round().nan_to_num(0.0).clamp(0, largest)
    packed = _pack(codes.to(torch.uint8).view(blocks.shape), bits)
    return packed, torch.stack([_stored(step, is_key), _stored(lowest, is_key)], 1)


def dequantize_blocks(
    codes: Tensor,
    steps: Tensor,
    out: Tensor,
    *,
    bits: int,
    is_key: bool,
    scratch: Tensor | None = None,
) -> None:
    """Write what `quantize_blocks` has stored to `out [n, block_size, num_heads, dim]`.

    `scratch`: memory like `codes`, which is overwritten.
    """
    scratch = torch.empty_like(codes) if scratch is None else scratch
    for index, part in enumerate(out.chunk(8 // bits, 1)):
        torch.bitwise_right_shift(codes, bits * index, out=scratch)
        part.copy_(scratch.bitwise_and_((1 << bits) - 1))
    groups = _in_groups(out, is_key)
    step, lowest = steps.to(out.dtype).unsqueeze(2 if is_key else -1).unbind(1)
    torch.addcmul(lowest, groups, step, out=groups)


def step_size(
    block_size: int, num_heads: int, dim: int, *, is_key: bool
) -> tuple[int, int, int] | tuple[int, int, int, int]:
    """The shape of a block's steps and smallest values, which are stored in SCALE_DTYPE."""
    if is_key:
        return 2, num_heads, dim
    return 2, block_size, num_heads, num_value_groups(dim)


def num_value_groups(dim: int) -> int:
    """The fewest equal groups of at most VALUE_GROUP channels."""
    fewest = -(-dim // VALUE_GROUP)
    return next(count for count in range(fewest, dim + 1) if dim % count == 0)


def block_bytes(block_size: int, num_heads: int, dim: int, *, bits: int, is_key: bool) -> int:
    """Bytes of one layer's keys or values of a block, without its open form."""
    num_steps = math.prod(step_size(block_size, num_heads, dim, is_key=is_key))
    return block_size * bits // 8 * num_heads * dim + num_steps * SCALE_DTYPE.itemsize


class GroupedStack(NamedTuple):
    """The keys, or the values, of several layers in the same memory."""

    pages: list[KvPages]
    tensors: tuple[Tensor, ...]
    """`[len(pages), num_blocks, ...]`."""
    opened: Tensor
    """`[len(pages), num_slots + 1, block_size, num_heads, dim]`."""


def stack_grouped_pages(
    count: int,
    size: tuple[int, int, int, int],
    *,
    dtype: torch.dtype,
    bits: int,
    is_key: bool,
    blocks: OpenBlocks,
    device: torch.device,
) -> GroupedStack:
    """`count` pages of zeros, `size` as in KvPages; `dtype`: that of open blocks and of gathered
    ones."""
    num_blocks, block_size, num_heads, dim = size
    assert block_size * bits % 8 == 0, "a block of codes is whole bytes"
    codes_size = (count, num_blocks, block_size * bits // 8, num_heads, dim)
    codes = allocate_zeros(codes_size, torch.uint8, device)
    own_steps = step_size(block_size, num_heads, dim, is_key=is_key)
    steps = allocate_zeros((count, num_blocks, *own_steps), SCALE_DTYPE, device)
    opened_size = (count, blocks.num_slots + 1, block_size, num_heads, dim)
    opened = allocate_zeros(opened_size, dtype, device)
    pages: list[KvPages] = [
        GroupedPages(*own, is_key=is_key, blocks=blocks)
        for own in zip(codes, steps, opened, strict=True)
    ]
    return GroupedStack(pages, (codes, steps), opened)


def _in_groups(blocks: Tensor, is_key: bool) -> Tensor:
    """Values with their groups of channels as the last axis, keys as they are."""
    if is_key:
        return blocks
    groups: Tensor = blocks.unflatten(-1, (num_value_groups(blocks.shape[-1]), -1))
    return groups


def _stored(reduced: Tensor, is_key: bool) -> Tensor:
    return reduced.squeeze(1 if is_key else -1)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes `[n, block_size, ...]` as bytes: a part of the block's tokens above the other."""
    parts = codes.chunk(8 // bits, 1)
    packed = parts[0].clone()
    for index, part in enumerate(parts[1:], 1):
        packed |= part << (bits * index)
    return packed


def _rounded(exact: Tensor, towards: float) -> Tensor:
    """In SCALE_DTYPE, never on the other side of the exact value: codes then span the whole
    group."""
    nearest = exact.to(SCALE_DTYPE)
    is_beyond = nearest.float() > exact if towards < 0 else nearest.float() < exact
    limit = torch.tensor(towards, dtype=SCALE_DTYPE, device=exact.device)
    return torch.where(is_beyond, torch.nextafter(nearest, limit), nearest)
