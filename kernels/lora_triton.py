"""The LoRA op in Triton: one pair of tiled kernels for decoding and prefill.

A tile is up to `TILE_TOKENS` adjacent tokens and one adapter row; tokens of other rows in the tile
are skipped. For prefill a tile is a part of a segment and includes all its tokens. For decoding
each block of tokens has one tile per adapter in it, so that each adapter's matrices are read once
and nothing is sorted. Tokens of other adapters are never loaded and never stored.

Shrink writes partial sums over `in_features / splits` columns to separate places in h, and expand
adds them while it loads: no atomics, no memset, and always the same order of summation. A row's
result depends only on its own input and adapter, to the bit: tiles have the same shape in every
step, in_features determines the splits of columns, and the adapter's own rank determines the splits
of ranks. Everything that changes from step to step (tiles, table, ranks) is read from device
memory, so loading and evicting adapters needs no compilation, and a grid of fixed size can be
captured.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .lora_batch import TILE_TOKENS, LoraTiles
from .lora_weights import AdapterWeights

ALIGNMENT = 16
"""Elements that matrices' offsets and row lengths must be multiples of for wide loads."""
MAX_SPLITS = 8
MIN_SPLIT_COLUMNS = 1024
"""The minimum columns of x per program. On an H100, 512 take longer, because expand has more splits
to add."""
MIN_BLOCK_RANK = 16  # tl.dot's smallest
SHRINK_RANKS = 64
"""Ranks per tile of shrink for adapters of more than `MIN_BLOCK_RANK`."""
EXPAND_RANKS = {2: 32, 4: 16}
"""Ranks per tile of expand, at most, by the bytes of an element."""
SHRINK_OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
EXPAND_OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
"""Expand's loop seldom runs twice: a pipeline would only take shared memory."""


def add_tiles(
    x: Tensor,
    y: Tensor,
    weights: AdapterWeights,
    token_rows: Tensor,
    work: LoraTiles,
    *,
    first_slice: int,
    slice_outs: tuple[int, ...],
    num_experts: int = 1,
) -> None:
    """Add the LoRA delta of one projection to y, in place, for the tokens of these tiles.

    x `[num_tokens, in_features]`; y `[num_tokens, sum(slice_outs)]`; both rows dense.
    token_rows int32 `[num_tokens]`. num_experts: how many experts the one slice has; then tokens
    are pairs, and rows, also those of the tiles, are table row × num_experts + expert.
    """
    h = shrink_tiles(
        x,
        weights,
        token_rows,
        work,
        first_slice=first_slice,
        num_slices=len(slice_outs),
        num_experts=num_experts,
    )
    expand_tiles(
        y,
        h,
        weights,
        token_rows,
        work,
        first_slice=first_slice,
        slice_outs=slice_outs,
        num_experts=num_experts,
    )


def shrink_tiles(
    x: Tensor,
    weights: AdapterWeights,
    token_rows: Tensor,
    work: LoraTiles,
    *,
    first_slice: int,
    num_slices: int,
    num_experts: int = 1,
) -> Tensor:
    """x times A for the tokens of these tiles: fp32 `[splits, num_tokens, num_slices, max_rank]`,
    parts of sums, written only where a token's adapter has ranks."""
    table = weights.table[:, first_slice : first_slice + num_slices]
    splits = num_splits(x.shape[1])
    max_rank = _round_up(work.max_rank, MIN_BLOCK_RANK)
    h = torch.empty(splits, x.shape[0], num_slices, max_rank, dtype=torch.float32, device=x.device)
    shrink_kernel[(work.tiles.shape[0], num_slices, splits)](
        h,
        x,
        weights.flat,
        table,
        work.tiles,
        token_rows,
        x.shape[1],
        x.stride(0),
        table.stride(0),
        h.stride(0),
        h.stride(1),
        max_rank,
        **shrink_constants(x.dtype, x.shape[1], work.max_rank, num_experts),
        **SHRINK_OPTIONS,
    )
    return h


def expand_tiles(
    y: Tensor,
    h: Tensor,
    weights: AdapterWeights,
    token_rows: Tensor,
    work: LoraTiles,
    *,
    first_slice: int,
    slice_outs: tuple[int, ...],
    num_experts: int = 1,
) -> None:
    """Add h, which `shrink_tiles` gave for the same work, times B to y, in place."""
    table = weights.table[:, first_slice : first_slice + len(slice_outs)]
    splits, _, _, max_rank = h.shape
    blocks = column_blocks(slice_outs, block_out(y.dtype), y.device)
    expand_kernel[(work.tiles.shape[0], blocks.shape[0])](
        y,
        h,
        weights.flat,
        table,
        work.tiles,
        token_rows,
        blocks,
        y.stride(0),
        table.stride(0),
        h.stride(0),
        h.stride(1),
        max_rank,
        **expand_constants(y.dtype, slice_outs, splits, work.max_rank, num_experts),
        **EXPAND_OPTIONS,
    )


def num_splits(in_features: int) -> int:
    """Programs that share one shrink along in_features."""
    return max(1, min(MAX_SPLITS, in_features // MIN_SPLIT_COLUMNS))


def block_in(dtype: torch.dtype) -> int:
    """Columns of x per iteration of shrink's loop: as many as three stages and 64 ranks leave room
    for, so that a program that mostly waits for memory has many loads in flight."""
    return 32 if dtype.itemsize == 4 else 128


def block_out(dtype: torch.dtype) -> int:
    """Columns of y per program. fp32 is multiplied without tensor cores and needs registers."""
    return 32 if dtype.itemsize == 4 else 256


def shrink_constants(
    dtype: torch.dtype, in_features: int, max_rank: int, num_experts: int = 1
) -> dict[str, Any]:
    """Shrink's compile-time values."""
    return {
        "NUM_EXPERTS": num_experts,
        "SPLITS": num_splits(in_features),
        "OFFSET_ALIGNMENT": ALIGNMENT if in_features % ALIGNMENT == 0 else 1,
        "BLOCK_TOKENS": TILE_TOKENS,
        "MIN_BLOCK_RANK": MIN_BLOCK_RANK,
        "BLOCK_RANK": MIN_BLOCK_RANK if max_rank <= MIN_BLOCK_RANK else SHRINK_RANKS,
        "BLOCK_IN": block_in(dtype),
        "UPCAST": INTERPRETED,
    }


def expand_constants(
    dtype: torch.dtype,
    slice_outs: tuple[int, ...],
    splits: int,
    max_rank: int,
    num_experts: int = 1,
) -> dict[str, Any]:
    """Expand's compile-time values."""
    aligned = all(out_features % ALIGNMENT == 0 for out_features in slice_outs)
    highest = EXPAND_RANKS[dtype.itemsize]
    return {
        "NUM_EXPERTS": num_experts,
        "SPLITS": splits,
        "OUT_ALIGNMENT": ALIGNMENT if aligned else 1,
        "BLOCK_TOKENS": TILE_TOKENS,
        # Padding wider blocks with zeros does not change the sums.
        "BLOCK_RANK": MIN_BLOCK_RANK if max_rank <= MIN_BLOCK_RANK else highest,
        "BLOCK_OUT": block_out(dtype),
        "UPCAST": INTERPRETED,
    }


@cache
def column_blocks(slice_outs: tuple[int, ...], width: int, device: torch.device) -> Tensor:
    """int32 `[num_blocks, 4]`: slice, first column in it, its width, its first column in y."""
    blocks = []
    y_start = 0
    for index, out_features in enumerate(slice_outs):
        blocks += [(index, c, out_features, y_start) for c in range(0, out_features, width)]
        y_start += out_features
    return torch.tensor(blocks, dtype=torch.int32, device=device)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@triton.jit
def shrink_kernel(
    h_ptr: tl.tensor,  # fp32 [SPLITS, num_tokens, num_slices, max_rank]
    x_ptr: tl.tensor,
    flat_ptr: tl.tensor,
    table_ptr: tl.tensor,  # int64 [num_rows, num_slices, 3]
    tiles_ptr: tl.tensor,
    token_rows_ptr: tl.tensor,
    in_features: int,
    x_stride: int,
    table_stride: int,
    h_split_stride: int,
    h_token_stride: int,
    max_rank: int,
    NUM_EXPERTS: tl.constexpr,
    SPLITS: tl.constexpr,
    OFFSET_ALIGNMENT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MIN_BLOCK_RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """h[split, t, slice, :rank] = x[t, columns of split] @ A.T for the tokens of one tile."""
    tile_ptr = tiles_ptr + tl.program_id(0) * 3
    index = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(tile_ptr)
    end = tl.load(tile_ptr + 1)
    row = tl.load(tile_ptr + 2)
    if row < 0:
        return
    entry_ptr = table_ptr + (row // NUM_EXPERTS).to(tl.int64) * table_stride + index * 3
    a_offset = tl.load(entry_ptr)
    rank = tl.load(entry_ptr + 2).to(tl.int32)
    if NUM_EXPERTS > 1:
        a_offset += (row % NUM_EXPERTS).to(tl.int64) * rank * in_features
    a_ptr = flat_ptr + tl.multiple_of(a_offset, OFFSET_ALIGNMENT)

    tokens = start + tl.arange(0, BLOCK_TOKENS)
    in_tile = tokens < end
    mine = in_tile & (tl.load(token_rows_ptr + tokens, mask=in_tile, other=-1) == row)
    x_rows = x_ptr + tokens.to(tl.int64)[:, None] * x_stride
    h_rows = h_ptr + split.to(tl.int64) * h_split_stride
    h_rows += tokens.to(tl.int64)[:, None] * h_token_stride + index * max_rank

    split_columns = (in_features + SPLITS * BLOCK_IN - 1) // (SPLITS * BLOCK_IN) * BLOCK_IN
    first_column = split * split_columns
    last_column = tl.minimum(first_column + split_columns, in_features)
    # A low rank has the same tile whatever the other ranks of the step are, and computes no
    # products with zeros next to a high rank.
    if BLOCK_RANK > MIN_BLOCK_RANK and rank > MIN_BLOCK_RANK:
        _shrink(
            h_rows,
            x_rows,
            a_ptr,
            mine,
            rank,
            first_column,
            last_column,
            in_features,
            BLOCK_TOKENS,
            BLOCK_RANK,
            BLOCK_IN,
            UPCAST,
        )
    else:
        _shrink(
            h_rows,
            x_rows,
            a_ptr,
            mine,
            rank,
            first_column,
            last_column,
            in_features,
            BLOCK_TOKENS,
            MIN_BLOCK_RANK,
            BLOCK_IN,
            UPCAST,
        )


@triton.jit
def _shrink(
    h_rows: tl.tensor,  # pointers [BLOCK_TOKENS, 1], as x_rows
    x_rows: tl.tensor,
    a_ptr: tl.tensor,
    mine: tl.tensor,
    rank: tl.tensor,
    first_column: tl.tensor,
    last_column: tl.tensor,
    in_features: int,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """h = x @ A.T of columns [first_column, last_column), `BLOCK_RANK` ranks at a time."""
    for first_rank in range(0, rank, BLOCK_RANK):
        ranks = first_rank + tl.arange(0, BLOCK_RANK)
        a_columns = a_ptr + ranks.to(tl.int64)[None, :] * in_features
        h = tl.full((BLOCK_TOKENS, BLOCK_RANK), 0.0, dtype=tl.float32)
        for column in range(first_column, last_column, BLOCK_IN):
            columns = column + tl.arange(0, BLOCK_IN)
            inside = columns < last_column
            x = tl.load(x_rows + columns[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
            a = tl.load(
                a_columns + columns[:, None],
                mask=(ranks < rank)[None, :] & inside[:, None],
                other=0.0,
            )
            if UPCAST:
                x = x.to(tl.float32)
                a = a.to(tl.float32)
            h = tl.dot(x, a, h, input_precision="ieee")
        tl.store(h_rows + ranks[None, :], h, mask=mine[:, None] & (ranks < rank)[None, :])


@triton.jit
def expand_kernel(
    y_ptr: tl.tensor,
    h_ptr: tl.tensor,  # fp32 [SPLITS, num_tokens, num_slices, max_rank]
    flat_ptr: tl.tensor,
    table_ptr: tl.tensor,  # int64 [num_rows, num_slices, 3]
    tiles_ptr: tl.tensor,
    token_rows_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    y_stride: int,
    table_stride: int,
    h_split_stride: int,
    h_token_stride: int,
    max_rank: int,
    NUM_EXPERTS: tl.constexpr,
    SPLITS: tl.constexpr,
    OUT_ALIGNMENT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """y[t, columns of block] += (sum of h over the splits) @ B for the tokens of one tile."""
    # Loads without dependencies come first: a program with few tokens mostly waits.
    tile_ptr = tiles_ptr + tl.program_id(0) * 3
    start = tl.load(tile_ptr)
    end = tl.load(tile_ptr + 1)
    row = tl.load(tile_ptr + 2)
    block_ptr = blocks_ptr + tl.program_id(1) * 4
    index = tl.load(block_ptr)
    first_column = tl.multiple_of(tl.load(block_ptr + 1), OUT_ALIGNMENT)
    out_features = tl.multiple_of(tl.load(block_ptr + 2), OUT_ALIGNMENT)
    y_start = tl.multiple_of(tl.load(block_ptr + 3), OUT_ALIGNMENT)
    if row < 0:
        return
    entry_ptr = table_ptr + (row // NUM_EXPERTS).to(tl.int64) * table_stride + index * 3
    b_offset = tl.load(entry_ptr + 1)
    rank = tl.load(entry_ptr + 2).to(tl.int32)
    if NUM_EXPERTS > 1:
        b_offset += (row % NUM_EXPERTS).to(tl.int64) * rank * out_features
    b_ptr = flat_ptr + tl.multiple_of(b_offset, OUT_ALIGNMENT)
    tokens = start + tl.arange(0, BLOCK_TOKENS)
    in_tile = tokens < end
    mine = in_tile & (tl.load(token_rows_ptr + tokens, mask=in_tile, other=-1) == row)
    if rank == 0:
        return

    columns = first_column + tl.arange(0, BLOCK_OUT)
    inside = columns < out_features
    y_ptrs = y_ptr + tokens.to(tl.int64)[:, None] * y_stride + y_start + columns[None, :]
    y_mask = mine[:, None] & inside[None, :]
    y = tl.load(y_ptrs, mask=y_mask, other=0.0)
    h_rows = h_ptr + tokens.to(tl.int64)[:, None] * h_token_stride + index * max_rank
    delta = tl.full((BLOCK_TOKENS, BLOCK_OUT), 0.0, dtype=tl.float32)
    for first_rank in range(0, rank, BLOCK_RANK):
        ranks = first_rank + tl.arange(0, BLOCK_RANK)
        h_mask = mine[:, None] & (ranks < rank)[None, :]
        b = tl.load(
            b_ptr + ranks.to(tl.int64)[:, None] * out_features + columns[None, :],
            mask=(ranks < rank)[:, None] & inside[None, :],
            other=0.0,
        )
        h = tl.full((BLOCK_TOKENS, BLOCK_RANK), 0.0, dtype=tl.float32)
        for split in tl.static_range(SPLITS):
            partial = h_rows + tl.cast(split, tl.int64) * h_split_stride + ranks[None, :]
            h += tl.load(partial, mask=h_mask, other=0.0)
        h = h.to(b.dtype)
        if UPCAST:
            h = h.to(tl.float32)
            b = b.to(tl.float32)
        delta = tl.dot(h, b, delta, input_precision="ieee")
    tl.store(y_ptrs, (y + delta).to(y.dtype), mask=y_mask)


INTERPRETED = not isinstance(shrink_kernel, triton.JITFunction)
"""Under TRITON_INTERPRET=1, where tl.dot of bf16 is wrong: dots are computed in fp32 then."""
