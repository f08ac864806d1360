"""Writes a step's keys and values to their pages in Triton kernels, with quantization.

The result equals that of `KvPages.write` bit for bit, except for vectors that are not finite: all
elements of such a vector, or of such a group of `kv_groups`, read as NaN.

Pages of `kv_groups` take a second launch, because a block's codes depend on vectors that several
programs store. It has programs for every token, and those of tokens that complete no block end at
once: so a captured grid serves every step.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_groups import GroupedPages, num_value_groups
from .kv_pages import KvPages, PlainPages, block_strides

WRITE_OPTIONS: dict[str, Any] = {"num_warps": 1}
CLOSE_OPTIONS: dict[str, Any] = {"num_warps": 4}


def write_pages(keys: KvPages, values: KvPages, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
    """See `kv_pages.write_pages`."""
    if not isinstance(keys, GroupedPages):
        _write_vectors(keys, values, slots, k, v)
        return
    assert isinstance(values, GroupedPages)
    opened = PlainPages(keys.opened), PlainPages(values.opened)
    _write_vectors(*opened, slots, k, v, open_slots=keys.blocks.slots)
    close_kernel[(len(slots), keys.num_heads, 2)](
        *(keys.data, keys.scales, keys.opened, values.data, values.scales, values.opened),
        keys.blocks.slots,
        slots,
        **close_constants(keys, values),
        **CLOSE_OPTIONS,
    )


def _write_vectors(
    keys: KvPages,
    values: KvPages,
    slots: Tensor,
    k: Tensor,
    v: Tensor | None,
    *,
    open_slots: Tensor | None = None,
) -> None:
    """`open_slots`: by block where its vectors are; None: the blocks are in order."""
    has_values = v is not None
    write_kernel[(k.shape[0], keys.num_heads)](
        keys.data,
        keys.scales,
        values.data if has_values else None,
        values.scales if has_values else None,
        k,
        v,
        slots,
        open_slots,
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
        "BLOCK_SIZE": keys.block_size,
        **block_strides(keys, values),
        "DIM": keys.dim,
        "VALUE_DIM": values.dim,
        "BLOCK_DIM": triton.next_power_of_2(keys.dim),
        "BLOCK_VALUE": triton.next_power_of_2(values.dim),
        "LARGEST": largest,
    }


def close_constants(keys: GroupedPages, values: GroupedPages) -> dict[str, Any]:
    """The compile-time values of `close_kernel`."""
    num_groups = num_value_groups(values.dim)
    num_rows = keys.data.shape[1]
    return {
        "NUM_HEADS": keys.num_heads,
        "BLOCK_SIZE": keys.block_size,
        "BITS": keys.bits,
        "DIM": keys.dim,
        "VALUE_DIM": values.dim,
        "NUM_GROUPS": num_groups,
        "BLOCK_ROWS": triton.next_power_of_2(num_rows),
        "BLOCK_DIM": triton.next_power_of_2(keys.dim),
        "BLOCK_GROUP": triton.next_power_of_2(values.dim // num_groups),
    }


@triton.jit
def write_kernel(
    keys_ptr: tl.tensor,  # [blocks, block size, NUM_HEADS, DIM], a block dense
    key_scales_ptr: tl.tensor,  # [blocks, block size, NUM_HEADS]; None: no codes
    values_ptr: tl.tensor,  # None: the values are part of the keys
    value_scales_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    slots_ptr: tl.tensor,  # int64 [num_tokens]
    open_slots_ptr: tl.tensor,  # int64 [blocks]: which block of the pages; None: its own
    k_token_stride: int,
    k_head_stride: int,
    v_token_stride: int,
    v_head_stride: int,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    KEY_SCALE_STRIDE: tl.constexpr,
    VALUE_SCALE_STRIDE: tl.constexpr,
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
    block = slot // BLOCK_SIZE
    if open_slots_ptr is not None:
        block = tl.load(open_slots_ptr + block)
        if block < 0:
            return
    token, block = token.to(tl.int64), block.to(tl.int64)
    place = slot % BLOCK_SIZE * NUM_HEADS + head  # in its block
    k_ptr += token * k_token_stride + head * k_head_stride
    key = block * KEY_STRIDE + place * DIM
    scale = block * KEY_SCALE_STRIDE + place
    _store(keys_ptr, key_scales_ptr, key, scale, k_ptr, DIM, BLOCK_DIM, LARGEST)
    if values_ptr is not None:
        v_ptr += token * v_token_stride + head * v_head_stride
        value = block * VALUE_STRIDE + place * VALUE_DIM
        scale = block * VALUE_SCALE_STRIDE + place
        _store(values_ptr, value_scales_ptr, value, scale, v_ptr, VALUE_DIM, BLOCK_VALUE, LARGEST)


@triton.jit
def _store(
    pages_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    start: tl.tensor,  # of the vector in the pages
    scale_place: tl.tensor,
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
        tl.store(scales_ptr + scale_place, scale)
        step = tl.maximum(scale.to(tl.float32), 1.1754943508222875e-38)
        vector = tl.div_rn(vector, step)
        vector = tl.minimum(tl.maximum(vector, -LARGEST), LARGEST)
        if pages_ptr.dtype.element_ty == tl.int8:
            # Adding a number that leaves no bits for fractions rounds to nearest, ties to even.
            vector = (vector + 12582912.0) - 12582912.0
    tl.store(pages_ptr + start + dims, vector.to(pages_ptr.dtype.element_ty), mask=inside)


@triton.jit
def close_kernel(
    key_codes_ptr: tl.tensor,  # uint8 [blocks, BLOCK_SIZE * BITS / 8, NUM_HEADS, DIM]
    key_steps_ptr: tl.tensor,  # bf16 [blocks, 2, NUM_HEADS, DIM]
    open_keys_ptr: tl.tensor,  # [open slots, BLOCK_SIZE, NUM_HEADS, DIM]
    value_codes_ptr: tl.tensor,
    value_steps_ptr: tl.tensor,  # bf16 [blocks, 2, BLOCK_SIZE, NUM_HEADS, NUM_GROUPS]
    open_values_ptr: tl.tensor,
    open_slots_ptr: tl.tensor,  # int64 [blocks]
    slots_ptr: tl.tensor,  # int64 [num_tokens]
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
) -> None:
    """Compute the codes of one head's keys or values in a block whose last token was stored."""
    slot = tl.load(slots_ptr + tl.program_id(0))
    head = tl.program_id(1)
    if slot < 0 or slot % BLOCK_SIZE != BLOCK_SIZE - 1:
        return
    block = slot // BLOCK_SIZE
    opened = tl.load(open_slots_ptr + block)
    if opened < 0:
        return
    if tl.program_id(2) == 0:
        _close_keys(
            key_codes_ptr + block * BLOCK_SIZE * BITS // 8 * NUM_HEADS * DIM,
            key_steps_ptr + block * 2 * NUM_HEADS * DIM,
            open_keys_ptr + opened * BLOCK_SIZE * NUM_HEADS * DIM,
            head,
            NUM_HEADS,
            BLOCK_SIZE,
            BITS,
            DIM,
            BLOCK_ROWS,
            BLOCK_DIM,
        )
    else:
        _close_values(
            value_codes_ptr + block * BLOCK_SIZE * BITS // 8 * NUM_HEADS * VALUE_DIM,
            value_steps_ptr + block * 2 * BLOCK_SIZE * NUM_HEADS * NUM_GROUPS,
            open_values_ptr + opened * BLOCK_SIZE * NUM_HEADS * VALUE_DIM,
            head,
            NUM_HEADS,
            BLOCK_SIZE,
            BITS,
            VALUE_DIM,
            NUM_GROUPS,
            BLOCK_ROWS,
            BLOCK_GROUP,
        )


@triton.jit
def _close_keys(
    codes_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    open_ptr: tl.tensor,
    head: tl.tensor,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """A step for each channel. A row of codes holds tokens that are ROWS apart."""
    ROWS: tl.constexpr = BLOCK_SIZE * BITS // 8
    rows = tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_DIM)
    inside = (rows < ROWS)[:, None] & (dims < DIM)[None, :]
    places = (rows[:, None] * NUM_HEADS + head) * DIM + dims[None, :]
    lowest = tl.full((BLOCK_DIM,), float("inf"), dtype=tl.float32)
    highest = tl.full((BLOCK_DIM,), float("-inf"), dtype=tl.float32)
    zero = tl.full((BLOCK_DIM,), 0.0, dtype=tl.float32)
    for part in tl.static_range(8 // BITS):
        open_ptrs = open_ptr + part * ROWS * NUM_HEADS * DIM + places
        x = tl.load(open_ptrs, mask=inside, other=0.0).to(tl.float32)
        lowest = tl.minimum(lowest, tl.min(tl.where(inside, x, float("inf")), axis=0))
        highest = tl.maximum(highest, tl.max(tl.where(inside, x, float("-inf")), axis=0))
        zero += tl.sum(x * 0.0, axis=0)
    lowest, step = _levels(lowest, highest, zero, BITS)
    step_ptrs = steps_ptr + head * DIM + dims
    tl.store(step_ptrs, step.to(tl.bfloat16), mask=dims < DIM)
    tl.store(step_ptrs + NUM_HEADS * DIM, lowest.to(tl.bfloat16), mask=dims < DIM)
    packed = tl.full((BLOCK_ROWS, BLOCK_DIM), 0, dtype=tl.int32)
    for part in tl.static_range(8 // BITS):
        open_ptrs = open_ptr + part * ROWS * NUM_HEADS * DIM + places
        x = tl.load(open_ptrs, mask=inside, other=0.0).to(tl.float32)
        packed |= _codes(x, lowest[None, :], step[None, :], BITS) << (BITS * part)
    tl.store(codes_ptr + places, packed.to(tl.uint8), mask=inside)


@triton.jit
def _close_values(
    codes_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    open_ptr: tl.tensor,
    head: tl.tensor,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    DIM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
) -> None:
    """A step for each token and group of channels. Rows of codes as in `_close_keys`."""
    ROWS: tl.constexpr = BLOCK_SIZE * BITS // 8
    GROUP: tl.constexpr = DIM // NUM_GROUPS
    rows = tl.arange(0, BLOCK_ROWS)
    channels = tl.arange(0, BLOCK_GROUP)
    inside = (rows < ROWS)[:, None] & (channels < GROUP)[None, :]
    for group in tl.static_range(NUM_GROUPS):
        places = (rows[:, None] * NUM_HEADS + head) * DIM + group * GROUP + channels[None, :]
        packed = tl.full((BLOCK_ROWS, BLOCK_GROUP), 0, dtype=tl.int32)
        for part in tl.static_range(8 // BITS):
            open_ptrs = open_ptr + part * ROWS * NUM_HEADS * DIM + places
            x = tl.load(open_ptrs, mask=inside, other=0.0).to(tl.float32)
            lowest = tl.min(tl.where(inside, x, float("inf")), axis=1)
            highest = tl.max(tl.where(inside, x, float("-inf")), axis=1)
            lowest, step = _levels(lowest, highest, tl.sum(x * 0.0, axis=1), BITS)
            step_ptrs = steps_ptr + ((part * ROWS + rows) * NUM_HEADS + head) * NUM_GROUPS + group
            tl.store(step_ptrs, step.to(tl.bfloat16), mask=rows < ROWS)
            step_ptrs += BLOCK_SIZE * NUM_HEADS * NUM_GROUPS
            tl.store(step_ptrs, lowest.to(tl.bfloat16), mask=rows < ROWS)
            packed |= _codes(x, lowest[:, None], step[:, None], BITS) << (BITS * part)
        tl.store(codes_ptr + places, packed.to(tl.uint8), mask=inside)


@triton.jit
def _levels(
    lowest: tl.tensor, highest: tl.tensor, zero: tl.tensor, BITS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The smallest value and the step of groups, in fp32 with bf16's precision.

    `zero`: NaN if an element of the group is not finite: then both are NaN.
    """
    LARGEST: tl.constexpr = (1 << BITS) - 1.0
    lowest = _rounded(lowest + zero, False)
    return lowest, _rounded(tl.div_rn(highest + zero - lowest, LARGEST), True)


@triton.jit
def _rounded(exact: tl.tensor, UP: tl.constexpr) -> tl.tensor:
    """The nearest number in bf16 that is not on the other side: codes then span the group."""
    bits = exact.to(tl.int32, bitcast=True)
    towards_zero = bits & -65536
    is_beyond = (towards_zero != bits) & ((exact > 0) if UP else (exact < 0))
    return tl.where(is_beyond, towards_zero + 65536, towards_zero).to(tl.float32, bitcast=True)


@triton.jit
def _codes(x: tl.tensor, lowest: tl.tensor, step: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """int32, zero where a group is not finite."""
    LARGEST: tl.constexpr = (1 << BITS) - 1.0
    exact = tl.div_rn(x - lowest, tl.maximum(step, 1.1754943508222875e-38))
    exact = tl.where(exact == exact, exact, 0.0)
    exact = tl.minimum(tl.maximum(exact, 0.0), LARGEST)
    # To the nearest, ties to even, as in `_store`.
    return ((exact + 12582912.0) - 12582912.0).to(tl.int32)
