"""Writes a step's keys and values to their pages in one Triton kernel, with quantization.

The result equals that of `KvPages.write` bit for bit, except for vectors that are not finite: all
elements of such a vector read as NaN.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_pages import KvPages

WRITE_OPTIONS: dict[str, Any] = {"num_warps": 1}


def write_pages(keys: KvPages, values: KvPages, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
    """See `kv_pages.write_pages`."""
    has_values = v is not None
    write_kernel[(k.shape[0], keys.num_heads)](
        keys.data,
        keys.scales,
        values.data if has_values else None,
        values.scales if has_values else None,
        k,
        v,
        slots,
        k.stride(0),
        k.stride(1),
        0 if v is None else v.stride(0),
        0 if v is None else v.stride(1),
        **write_constants(keys, values),
        **WRITE_OPTIONS,
    )


def write_constants(keys: KvPages, values: KvPages) -> dict[str, Any]:
    """The compile-time values of `write_kernel`."""
    quantized = keys.data.dtype
    largest = None
    if keys.scales is not None:
        largest = float(
            (torch.finfo if quantized.is_floating_point else torch.iinfo)(quantized).max
        )
    return {
        "NUM_HEADS": keys.num_heads,
        "DIM": keys.dim,
        "VALUE_DIM": values.dim,
        "BLOCK_DIM": triton.next_power_of_2(keys.dim),
        "BLOCK_VALUE": triton.next_power_of_2(values.dim),
        "LARGEST": largest,
    }


@triton.jit
def write_kernel(
    keys_ptr: tl.tensor,  # [blocks, block size, NUM_HEADS, DIM]
    key_scales_ptr: tl.tensor,  # [blocks, block size, NUM_HEADS]; None: no codes
    values_ptr: tl.tensor,  # None: the values are part of the keys
    value_scales_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    slots_ptr: tl.tensor,  # int64 [num_tokens]
    k_token_stride: int,
    k_head_stride: int,
    v_token_stride: int,
    v_head_stride: int,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """Store one token's key and value of one head."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    token = token.to(tl.int64)
    place = slot * NUM_HEADS + head
    k_ptr += token * k_token_stride + head * k_head_stride
    _store(keys_ptr, key_scales_ptr, place, k_ptr, DIM, BLOCK_DIM, LARGEST)
    if values_ptr is not None:
        v_ptr += token * v_token_stride + head * v_head_stride
        _store(values_ptr, value_scales_ptr, place, v_ptr, VALUE_DIM, BLOCK_VALUE, LARGEST)


@triton.jit
def _store(
    pages_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    place: tl.tensor,
    vector_ptr: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    dims = tl.arange(0, BLOCK_DIM)
    inside = dims < DIM
    vector = tl.load(vector_ptr + dims, mask=inside, other=0.0)
    if scales_ptr is not None:
        vector = vector.to(tl.float32)
        # A sum of zeros, but NaN if an element is not finite: such rows must be found.
        largest = tl.max(tl.abs(vector), axis=0) + tl.sum(vector * 0.0, axis=0)
        scale = tl.div_rn(largest, LARGEST).to(scales_ptr.dtype.element_ty)
        tl.store(scales_ptr + place, scale)
        step = tl.maximum(scale.to(tl.float32), 1.1754943508222875e-38)
        vector = tl.div_rn(vector, step)
        vector = tl.minimum(tl.maximum(vector, -LARGEST), LARGEST)
        if pages_ptr.dtype.element_ty == tl.int8:
            # Adding a number that leaves no bits for fractions rounds to nearest, ties to even.
            vector = (vector + 12582912.0) - 12582912.0
    tl.store(pages_ptr + place * DIM + dims, vector.to(pages_ptr.dtype.element_ty), mask=inside)
