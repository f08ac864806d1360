"""The base matmul of an MoE layer in Triton: one launch for all experts; see `grouped_linear`.

A program computes a block of columns for one tile of pairs, which belong to one expert. Tiles are
read from device memory, and those without work end at once, so a captured launch serves any
routing. A tile has the same shape in every step and no sum is split, so no other pair changes a bit
of a pair's result.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .lora_batch import TILE_TOKENS

BLOCKS = {2: (64, 128), 4: (32, 32)}
"""Columns of y per program, and columns of x per iteration, by the bytes of an element: pieces of a
matrix's rows that are read at once. fp32 is multiplied without tensor cores and needs registers."""
GROUPED_OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 3}


def multiply_tiles(
    x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tensor, *, is_transposed: bool
) -> Tensor:
    """See `grouped_linear.grouped_linear`; `tiles`: see `ExpertTiles.base`.

    Raises ValueError if the rows of a matrix are not dense.
    """
    if x.stride(1) != 1 or weight.stride(2) != 1 or (bias is not None and bias.stride(1) != 1):
        raise ValueError("the rows of x, of the matrices and of the bias must be dense")
    num_pairs, in_features = x.shape
    out_features = weight.shape[2 if is_transposed else 1]
    y = x.new_empty(num_pairs, out_features)
    block_out, _ = BLOCKS[x.dtype.itemsize]
    # Tiles of one expert are neighbours in the grid: they read the same matrix from the L2 cache.
    grouped_kernel[(len(tiles), triton.cdiv(out_features, block_out))](
        y,
        x,
        weight,
        bias,
        tiles,
        in_features,
        out_features,
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        0 if bias is None else bias.stride(0),
        **grouped_constants(x.dtype, is_transposed=is_transposed),
        **GROUPED_OPTIONS,
    )
    return y


def grouped_constants(dtype: torch.dtype, *, is_transposed: bool) -> dict[str, Any]:
    """The compile-time values of `grouped_kernel`."""
    block_out, block_in = BLOCKS[dtype.itemsize]
    return {
        "IS_TRANSPOSED": is_transposed,
        "BLOCK_PAIRS": TILE_TOKENS,
        "BLOCK_OUT": block_out,
        "BLOCK_IN": block_in,
        "UPCAST": INTERPRETED,
    }


@triton.jit
def grouped_kernel(
    y_ptr: tl.tensor,  # [num_pairs, out_features]
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,  # [experts, out, in], or [experts, in, out] if IS_TRANSPOSED
    bias_ptr: tl.tensor,  # [experts, out], or None
    tiles_ptr: tl.tensor,
    in_features: int,
    out_features: int,
    x_stride: int,
    expert_stride: int,
    weight_stride: int,
    bias_stride: int,
    IS_TRANSPOSED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """y[p, columns of block] = x[p] @ the matrix of the tile's expert, for the pairs of a tile."""
    tile_ptr = tiles_ptr + tl.program_id(0) * 3
    start = tl.load(tile_ptr)
    end = tl.load(tile_ptr + 1)
    expert = tl.load(tile_ptr + 2)
    if expert < 0:
        return
    pairs = start + tl.arange(0, BLOCK_PAIRS)
    mine = pairs < end
    outs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inside = outs < out_features
    x_rows = x_ptr + pairs.to(tl.int64)[:, None] * x_stride
    matrix_ptr = weight_ptr + expert.to(tl.int64) * expert_stride

    total = tl.full((BLOCK_PAIRS, BLOCK_OUT), 0.0, dtype=tl.float32)
    for first in range(0, in_features, BLOCK_IN):
        columns = first + tl.arange(0, BLOCK_IN)
        exist = columns < in_features
        if IS_TRANSPOSED:
            places = columns.to(tl.int64)[:, None] * weight_stride + outs[None, :]
        else:
            places = outs.to(tl.int64)[None, :] * weight_stride + columns[:, None]
        x = tl.load(x_rows + columns[None, :], mask=mine[:, None] & exist[None, :], other=0.0)
        matrix = tl.load(
            matrix_ptr + places, mask=exist[:, None] & inside[None, :], other=0.0
        )  # [BLOCK_IN, BLOCK_OUT]
        if UPCAST:
            x = x.to(tl.float32)
            matrix = matrix.to(tl.float32)
        total = tl.dot(x, matrix, total, input_precision="ieee")

    y = total.to(y_ptr.dtype.element_ty)
    if bias_ptr is not None:
        # The product is rounded before it is added, as everywhere.
        bias = tl.load(bias_ptr + expert.to(tl.int64) * bias_stride + outs, mask=inside, other=0.0)
        y = (y.to(tl.float32) + bias.to(tl.float32)[None, :]).to(y_ptr.dtype.element_ty)
    y_ptrs = y_ptr + pairs.to(tl.int64)[:, None] * out_features + outs[None, :]
    tl.store(y_ptrs, y, mask=mine[:, None] & inside[None, :])


INTERPRETED = not isinstance(grouped_kernel, triton.JITFunction)
"""See `lora_triton`."""
