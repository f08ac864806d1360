"""The vectors of adapters in one Triton kernel; see `lora_vectors`.

The positions of vectors are read from device memory, so a launch that was captured serves other
adapters later.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .lora_triton import ALIGNMENT, column_blocks
from .lora_weights import AdapterWeights

BLOCK_OUT = 1024
"""Columns of y per program: most programs have nothing to do, so they are few."""
VECTORS_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
"""Without fusion a product is rounded to fp32 before it is added, as in the definition."""


def apply_vectors(
    y: Tensor,
    weights: AdapterWeights,
    token_rows: Tensor,
    base_bias: Tensor | None,
    *,
    first_slice: int,
    slice_outs: tuple[int, ...],
) -> None:
    """See `lora_vectors.apply_vectors`."""
    vectors = weights.vectors[:, first_slice : first_slice + len(slice_outs)]
    blocks = column_blocks(slice_outs, BLOCK_OUT, y.device)
    vectors_kernel[(len(y), len(blocks))](
        y,
        weights.flat,
        vectors,
        token_rows,
        blocks,
        base_bias,
        y.stride(0),
        vectors.stride(0),
        **vectors_constants(slice_outs),
        **VECTORS_OPTIONS,
    )


def vectors_constants(slice_outs: tuple[int, ...]) -> dict[str, Any]:
    """The compile-time values of `vectors_kernel`."""
    aligned = all(out_features % ALIGNMENT == 0 for out_features in slice_outs)
    return {"OUT_ALIGNMENT": ALIGNMENT if aligned else 1, "BLOCK_OUT": BLOCK_OUT}


@triton.jit
def vectors_kernel(
    y_ptr: tl.tensor,
    flat_ptr: tl.tensor,
    vectors_ptr: tl.tensor,  # int64 [num_rows, num_slices, 3]
    token_rows_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    base_bias_ptr: tl.tensor,  # None: y includes no bias
    y_stride: int,
    vectors_stride: int,
    OUT_ALIGNMENT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
) -> None:
    """A block of columns of one slice, for one token."""
    token = tl.program_id(0)
    row = tl.load(token_rows_ptr + token)
    block_ptr = blocks_ptr + tl.program_id(1) * 4
    index = tl.load(block_ptr)
    first_column = tl.multiple_of(tl.load(block_ptr + 1), OUT_ALIGNMENT)
    out_features = tl.multiple_of(tl.load(block_ptr + 2), OUT_ALIGNMENT)
    y_start = tl.multiple_of(tl.load(block_ptr + 3), OUT_ALIGNMENT)
    if row < 0:
        return
    entry_ptr = vectors_ptr + row.to(tl.int64) * vectors_stride + index * 3
    magnitude = tl.load(entry_ptr)
    bias = tl.load(entry_ptr + 1)
    lora_bias = tl.load(entry_ptr + 2)
    if tl.maximum(tl.maximum(magnitude, bias), lora_bias) < 0:
        return

    columns = first_column + tl.arange(0, BLOCK_OUT)
    inside = columns < out_features
    y_ptrs = y_ptr + token.to(tl.int64) * y_stride + y_start + columns
    y = tl.load(y_ptrs, mask=inside, other=0.0)
    dtype = y.dtype
    y = y.to(tl.float32)
    if magnitude >= 0:
        product = y
        if base_bias_ptr is not None:
            base_bias = tl.load(base_bias_ptr + y_start + columns, mask=inside, other=0.0)
            product = (y - base_bias.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        factor = _vector(flat_ptr, magnitude, columns, inside)
        y = (y + product * factor).to(dtype).to(tl.float32)
    if bias >= 0:
        y = (y + _vector(flat_ptr, bias, columns, inside)).to(dtype).to(tl.float32)
    if lora_bias >= 0:
        y = (y + _vector(flat_ptr, lora_bias, columns, inside)).to(dtype).to(tl.float32)
    tl.store(y_ptrs, y.to(dtype), mask=inside)


@triton.jit
def _vector(
    flat_ptr: tl.tensor, offset: tl.tensor, columns: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    """fp32: one vector's values for these columns of its slice."""
    vector_ptr = flat_ptr + tl.multiple_of(offset, 16)
    return tl.load(vector_ptr + columns, mask=inside, other=0.0).to(tl.float32)
