"""The base matmul of quantized experts in Triton: one launch for all; see `grouped_linear_triton`.

Codes become numbers as in `wna16_triton`. No sum is split, so no other pair changes a bit of a
pair's result.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .lora_batch import TILE_TOKENS
from .wna16_triton import Launch, group_sums, sum_units, wna16_constants
from .wna16_weight import WNA16Weight


def multiply_quantized_tiles(x: Tensor, first: WNA16Weight, tiles: Tensor) -> Tensor:
    """`x[p] @ W[expert of p].T` for each pair p: `[num_pairs, out]` in x's dtype.

    x: `[num_pairs, in]`, its rows dense. first: expert 0; in memory, each of its parts is followed
    by those of the others. tiles: see `ExpertTiles.base`.
    """
    num_pairs, in_features = x.shape
    out_features = first.out_features
    y = x.new_empty(num_pairs, out_features)
    launch = choose_expert_launch(x.dtype)
    # Tiles of one expert are neighbours in the grid: they read the same codes from the L2 cache.
    wna16_experts_kernel[(len(tiles), triton.cdiv(out_features, launch.block_out))](
        y,
        x,
        first.words,
        first.scale,
        first.zero,
        None if first.zero is None else group_sums(x, first),
        first.table,
        tiles,
        in_features,
        out_features,
        first.num_units,
        first.words.numel(),
        first.scale.numel(),
        x.stride(0),
        **wna16_constants(first, launch),
        **launch.options,
    )
    return y


def choose_expert_launch(dtype: torch.dtype) -> Launch:
    """The tile of `wna16_triton` for as many rows."""
    if dtype.itemsize == 4:  # multiplied without tensor cores
        return Launch(32, TILE_TOKENS, 1, num_warps=4, num_stages=2)
    return Launch(64, TILE_TOKENS, 1, num_warps=4, num_stages=3)


@triton.jit
def wna16_experts_kernel(
    y_ptr: tl.tensor,  # [num_pairs, out]
    x_ptr: tl.tensor,
    words_ptr: tl.tensor,  # [experts, ...], as scales and zero points
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,  # or None
    sums_ptr: tl.tensor,  # of x over each group: fp32 [num_pairs, groups], or None
    table_ptr: tl.tensor,  # or None
    tiles_ptr: tl.tensor,
    in_features: int,
    out_features: int,
    num_units: int,
    words_stride: int,
    scale_stride: int,
    x_stride: int,
    CODES: tl.constexpr,
    PARTS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PLAIN: tl.constexpr,
) -> None:
    """y[p, outs of block] = x[p] @ the matrix of the tile's expert, for the pairs of a tile."""
    tile_ptr = tiles_ptr + tl.program_id(0) * 3
    start = tl.load(tile_ptr)
    end = tl.load(tile_ptr + 1)
    expert = tl.load(tile_ptr + 2)
    if expert < 0:
        return
    pairs = start + tl.arange(0, BLOCK_ROWS)
    mine = pairs < end
    outs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    scale_start = expert.to(tl.int64) * scale_stride
    expert_zero_ptr = zero_ptr
    if zero_ptr is not None:
        expert_zero_ptr = zero_ptr + scale_start
    total = sum_units(
        x_ptr,
        words_ptr + expert.to(tl.int64) * words_stride,
        scale_ptr + scale_start,
        expert_zero_ptr,
        sums_ptr,
        table_ptr,
        outs,
        pairs,
        mine,
        0,
        num_units,
        in_features,
        out_features,
        num_units,
        x_stride,
        CODES,
        PARTS,
        NUM_WORDS,
        GROUP,
        HAS_TAIL,
        BLOCK_OUT,
        BLOCK_ROWS,
        PLAIN,
    )
    y_ptrs = y_ptr + pairs.to(tl.int64)[None, :] * out_features + outs[:, None]
    y_mask = (outs < out_features)[:, None] & mine[None, :]
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=y_mask)
