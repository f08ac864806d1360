"""Triton matmuls of int8 or int4 weights with activations of 16 or 32 bits.

The weight is the left operand, `y.T = W @ x.T`: codes go from memory to registers, are converted
there exactly to x's dtype, and are multiplied; scales are applied to fp32 sums. With few rows,
reading the codes determines the time, so several programs may split in_features (`splits`). Each
writes its sum to its own place, and a second kernel adds the sums in order: no atomics, always the
same result. Rows of x are columns of one product, so no row changes another's result. With many
rows it is faster to dequantize the weight and leave the product to PyTorch (`dequantize_weights`).

Launches depend on shapes only and do not synchronize, so they can be captured.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .int4_quantized import GROUP

WORD_BITS = 16
"""Codes are stored in words as wide as the numbers they are converted to, so no byte is moved."""
MAX_SPLITS = 8
MIN_SPLIT_GROUPS = 8
"""Groups that are worth a program."""
SUM_BLOCK = 1024
SUM_OPTIONS: dict[str, Any] = {"num_warps": 4}
DEQUANTIZE_BLOCK_OUT = 32
DEQUANTIZE_OPTIONS: dict[str, Any] = {"num_warps": 4}
INT8_TO_BF16 = tl.constexpr("""{
    .reg .b32 second, low, sign, minus;
    mov.b32 minus, 0xBF80BF80;
    lop3.b32 low, $2, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 sign, $2, 0x00800080, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, sign, minus, low;
    shr.b32 second, $2, 8;
    lop3.b32 low, second, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 sign, second, 0x00800080, 0x43004300, 0xEA;
    fma.rn.bf16x2 $1, sign, minus, low;
}""")
"""Two words at once. Set into the last bits of 128 (0x4300), a code's seven low bits make 128 plus
them; its sign bit there makes 256, or leaves 128. The code is the difference."""
INT4_TO_BF16 = tl.constexpr("""{
    .reg .b32 second, third, fourth, code, one, offset;
    mov.b32 one, 0x3F803F80;
    mov.b32 offset, 0xC308C308;
    lop3.b32 code, $4, 0x000F000F, 0x43084308, 0x6A;
    fma.rn.bf16x2 $0, code, one, offset;
    shr.b32 second, $4, 4;
    lop3.b32 code, second, 0x000F000F, 0x43084308, 0x6A;
    fma.rn.bf16x2 $1, code, one, offset;
    shr.b32 third, $4, 8;
    lop3.b32 code, third, 0x000F000F, 0x43084308, 0x6A;
    fma.rn.bf16x2 $2, code, one, offset;
    shr.b32 fourth, $4, 12;
    lop3.b32 code, fourth, 0x000F000F, 0x43084308, 0x6A;
    fma.rn.bf16x2 $3, code, one, offset;
}""")
"""Two words at once. A code's bits exclusive-or 136 (0x4308) make 136 plus the code."""


class Launch(NamedTuple):
    """The division of one product among programs."""

    block_out: int
    block_rows: int
    splits: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def multiply_quantized(
    x: Tensor,
    quantized: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    *,
    launch: Launch | None = None,
) -> Tensor:
    """`x @ W.T + bias`: `[rows, out]` in x's type.

    x `[rows, in]`, its rows dense.
    codes: int16 `[groups, out, words]` as `pack_quantized` makes them, zero beyond `in`.
    scale: fp32 `[1, out]` with int8 codes, bf16 `[groups, out]` with int4.
    launch: how to divide the product, instead of the measured way.
    """
    num_rows, in_features = x.shape
    num_groups, out_features, num_words = quantized.shape
    bits = WORD_BITS * num_words // GROUP
    y = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    launch = launch or choose_launch(num_rows, out_features, num_groups, x.dtype)
    sums = y
    if launch.splits > 1:
        sums = torch.empty(launch.splits, *y.shape, dtype=torch.float32, device=x.device)
    row_tiles = triton.cdiv(num_rows, launch.block_rows)
    wna16_kernel[(row_tiles * triton.cdiv(out_features, launch.block_out), launch.splits)](
        sums,
        x,
        quantized,
        scale,
        bias if sums is y else None,
        num_rows,
        in_features,
        out_features,
        num_groups,
        triton.cdiv(num_groups, launch.splits),
        x.stride(0),
        row_tiles,
        **wna16_constants(in_features, bits, launch),
        **launch.options,
    )
    if sums is not y:
        _add_splits(sums, bias, y)
    return y


def _add_splits(sums: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Set y to the sum of `sums [splits, rows, out]` and the bias."""
    constants = sum_constants(len(sums))
    grid = (triton.cdiv(y.numel(), SUM_BLOCK),)
    sum_kernel[grid](y, sums, bias, y.numel(), y.shape[1], **constants, **SUM_OPTIONS)


def dequantize_weights(
    quantized: Tensor, scale: Tensor, in_features: int, dtype: torch.dtype
) -> Tensor:
    """The weight `[out, in]`, each element rounded once to dtype; arguments as above."""
    num_groups, out_features, num_words = quantized.shape
    weight = torch.empty(out_features, in_features, dtype=dtype, device=quantized.device)
    blocks = triton.cdiv(out_features, DEQUANTIZE_BLOCK_OUT)
    dequantize_kernel[(num_groups, blocks)](
        weight,
        quantized,
        scale,
        in_features,
        out_features,
        **dequantize_constants(WORD_BITS * num_words // GROUP),
        **DEQUANTIZE_OPTIONS,
    )
    return weight


def pack_quantized(quantized: Tensor, bits: int) -> Tensor:
    """int16 words `[groups, out, words]` of int8 codes `[out, groups, GROUP]`.

    Word i holds the codes of columns i, i + words, ... of the group, from its lowest bits on.
    """
    num_parts = WORD_BITS // bits
    words = torch.zeros_like(quantized[..., : GROUP // num_parts], dtype=torch.int16)
    for place, part in enumerate(quantized.chunk(num_parts, dim=-1)):
        words |= (part.to(torch.int16) & ((1 << bits) - 1)) << (place * bits)
    return words.transpose(0, 1).contiguous()


@cache
def choose_launch(num_rows: int, out_features: int, num_groups: int, dtype: torch.dtype) -> Launch:
    """By shapes alone: the best of those measured on an H100 with the layers of an 8B model."""
    if dtype.itemsize == 4:  # multiplied without tensor cores
        launch, max_programs = Launch(32, 16, 1, num_warps=4, num_stages=2), 512
    elif num_rows <= 32:
        block_rows = 16 if num_rows <= 16 else 32
        launch, max_programs = Launch(64, block_rows, 1, num_warps=4, num_stages=3), 512
    else:
        launch, max_programs = Launch(128, 64, 1, num_warps=8, num_stages=4), 132
    num_tiles = triton.cdiv(out_features, launch.block_out)
    num_tiles *= triton.cdiv(num_rows, launch.block_rows)
    limit = min(MAX_SPLITS, max_programs // num_tiles, num_groups // MIN_SPLIT_GROUPS)
    return launch._replace(splits=1 << max(limit, 1).bit_length() - 1)


def wna16_constants(in_features: int, bits: int, launch: Launch) -> dict[str, Any]:
    """The compile-time values of `wna16_kernel`."""
    return {
        "BITS": bits,
        "GROUP": GROUP,
        "HAS_TAIL": in_features % GROUP != 0,
        "BLOCK_OUT": launch.block_out,
        "BLOCK_ROWS": launch.block_rows,
        "PLAIN": INTERPRETED,
    }


def sum_constants(splits: int) -> dict[str, Any]:
    """The compile-time values of `sum_kernel`."""
    return {"SPLITS": splits, "BLOCK": SUM_BLOCK}


def dequantize_constants(bits: int) -> dict[str, Any]:
    """The compile-time values of `dequantize_kernel`."""
    return {"BITS": bits, "GROUP": GROUP, "BLOCK_OUT": DEQUANTIZE_BLOCK_OUT, "PLAIN": INTERPRETED}


@triton.jit(do_not_specialize=["num_rows", "num_groups", "per_split", "row_tiles"])
def wna16_kernel(
    y_ptr: tl.tensor,  # [num_rows, out], or fp32 [splits, num_rows, out]
    x_ptr: tl.tensor,
    quantized_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,  # or None
    num_rows: int,
    in_features: int,
    out_features: int,
    num_groups: int,
    per_split: int,
    x_stride: int,
    row_tiles: int,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PLAIN: tl.constexpr,
) -> None:
    """One tile of y.T, over one split's groups."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    outs = tile // row_tiles * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = tile % row_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_out = outs < out_features
    in_rows = rows < num_rows
    NUM_WORDS: tl.constexpr = GROUP * BITS // 16
    places = tl.arange(0, NUM_WORDS)
    group_words = tl.cast(out_features, tl.int64) * NUM_WORDS
    code_ptrs = quantized_ptr + outs.to(tl.int64)[:, None] * NUM_WORDS + places[None, :]
    x_ptrs = x_ptr + rows.to(tl.int64)[None, :] * x_stride + places[:, None]
    first = split * per_split
    last = tl.minimum(first + per_split, num_groups)
    total = tl.full((BLOCK_OUT, BLOCK_ROWS), 0.0, dtype=tl.float32)
    for group in range(first, last):
        quantized = tl.load(code_ptrs + group * group_words, mask=in_out[:, None], other=0)
        start = group * GROUP
        columns = start + places[:, None]
        end = in_features if HAS_TAIL else None
        if BITS == 8:
            w0, w1 = _int8_parts(quantized, x_ptr.dtype.element_ty, PLAIN)
            total = _add(w0, x_ptrs + start, 0, in_rows, columns, end, total)
            total = _add(w1, x_ptrs + start, NUM_WORDS, in_rows, columns, end, total)
        else:
            w0, w1, w2, w3 = _int4_parts(quantized, x_ptr.dtype.element_ty, PLAIN)
            product = tl.full((BLOCK_OUT, BLOCK_ROWS), 0.0, dtype=tl.float32)
            product = _add(w0, x_ptrs + start, 0, in_rows, columns, end, product)
            product = _add(w1, x_ptrs + start, NUM_WORDS, in_rows, columns, end, product)
            product = _add(w2, x_ptrs + start, 2 * NUM_WORDS, in_rows, columns, end, product)
            product = _add(w3, x_ptrs + start, 3 * NUM_WORDS, in_rows, columns, end, product)
            scale_ptrs = scale_ptr + group * out_features + outs
            scale = tl.load(scale_ptrs, mask=in_out, other=0.0).to(tl.float32)
            total += product * scale[:, None]
    if BITS == 8:
        total *= tl.load(scale_ptr + outs, mask=in_out, other=0.0)[:, None]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outs, mask=in_out, other=0.0).to(tl.float32)[:, None]
    y_rows = (split.to(tl.int64) * num_rows + rows) * out_features
    y_mask = in_out[:, None] & in_rows[None, :]
    y_ptrs = y_ptr + y_rows[None, :] + outs[:, None]
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=y_mask)


@triton.jit
def _add(
    weight: tl.tensor,
    x_ptrs: tl.tensor,
    first: tl.constexpr,
    in_rows: tl.tensor,
    columns: tl.tensor,  # of x_ptrs
    end: tl.tensor | None,  # how many columns x has, if they may end in this group
    total: tl.tensor,
) -> tl.tensor:
    """total + weight @ x.T of one part of a group, whose columns begin `first` after x_ptrs."""
    mask = in_rows[None, :]
    if end is not None:
        mask = mask & (columns + first < end)
    x = tl.load(x_ptrs + first, mask=mask, other=0.0)
    return tl.dot(weight, x.to(weight.dtype), total, input_precision="ieee")


@triton.jit
def _int8_parts(
    quantized: tl.tensor, dtype: tl.constexpr, PLAIN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The words' two codes as numbers of x's type."""
    if dtype == tl.bfloat16 and not PLAIN:
        w0, w1 = tl.inline_asm_elementwise(
            INT8_TO_BF16,
            "=r,=r,r",
            [quantized],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        number: tl.constexpr = tl.float32 if PLAIN else dtype
        w0 = ((quantized << 8) >> 8).to(number)
        w1 = (quantized >> 8).to(number)
    return w0, w1


@triton.jit
def _int4_parts(
    quantized: tl.tensor, dtype: tl.constexpr, PLAIN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The words' four codes as numbers of x's type."""
    if dtype == tl.bfloat16 and not PLAIN:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            INT4_TO_BF16,
            "=r,=r,=r,=r,r",
            [quantized],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        number: tl.constexpr = tl.float32 if PLAIN else dtype
        w0 = ((quantized << 12) >> 12).to(number)
        w1 = ((quantized << 8) >> 12).to(number)
        w2 = ((quantized << 4) >> 12).to(number)
        w3 = (quantized >> 12).to(number)
    return w0, w1, w2, w3


@triton.jit(do_not_specialize=["size"])
def sum_kernel(
    y_ptr: tl.tensor,
    sums_ptr: tl.tensor,  # fp32 [SPLITS, rows × out]
    bias_ptr: tl.tensor,  # or None
    size: int,
    out_features: int,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """y = the sum over the splits, in their order, and the bias."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    total = tl.load(sums_ptr + places, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(
            sums_ptr + split * tl.cast(size, tl.int64) + places, mask=inside, other=0.0
        )
    if bias_ptr is not None:
        total += tl.load(bias_ptr + places % out_features, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + places, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def dequantize_kernel(
    weight_ptr: tl.tensor,  # [out, in]
    quantized_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    in_features: int,
    out_features: int,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    PLAIN: tl.constexpr,
) -> None:
    """One group's columns in a block of rows."""
    group = tl.program_id(0)
    outs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    in_out = outs < out_features
    NUM_WORDS: tl.constexpr = GROUP * BITS // 16
    places = tl.arange(0, NUM_WORDS)
    code_rows = (group.to(tl.int64) * out_features + outs) * NUM_WORDS
    quantized = tl.load(quantized_ptr + code_rows[:, None] + places, mask=in_out[:, None], other=0)
    columns = group * GROUP + places[None, :]
    weight_ptrs = weight_ptr + outs.to(tl.int64)[:, None] * in_features + columns
    if BITS == 8:
        scale = tl.load(scale_ptr + outs, mask=in_out, other=0.0)[:, None]
        w0, w1 = _int8_parts(quantized, tl.float32, PLAIN)
        _store(weight_ptrs, 0, w0 * scale, in_out, columns, in_features)
        _store(weight_ptrs, NUM_WORDS, w1 * scale, in_out, columns, in_features)
    else:
        scale_ptrs = scale_ptr + group * out_features + outs
        scale = tl.load(scale_ptrs, mask=in_out, other=0.0).to(tl.float32)[:, None]
        w0, w1, w2, w3 = _int4_parts(quantized, tl.float32, PLAIN)
        _store(weight_ptrs, 0, w0 * scale, in_out, columns, in_features)
        _store(weight_ptrs, NUM_WORDS, w1 * scale, in_out, columns, in_features)
        _store(weight_ptrs, 2 * NUM_WORDS, w2 * scale, in_out, columns, in_features)
        _store(weight_ptrs, 3 * NUM_WORDS, w3 * scale, in_out, columns, in_features)


@triton.jit
def _store(
    ptrs: tl.tensor,
    first: tl.constexpr,
    weight: tl.tensor,
    in_out: tl.tensor,
    columns: tl.tensor,  # of ptrs
    in_features: int,
) -> None:
    """One part of a group, whose columns begin `first` after ptrs."""
    mask = in_out[:, None] & (columns + first < in_features)
    tl.store(ptrs + first, weight.to(ptrs.dtype.element_ty), mask=mask)


INTERPRETED = not isinstance(wna16_kernel, triton.JITFunction)
"""Under TRITON_INTERPRET=1, where tl.dot of bf16 is wrong: dots are computed in fp32 then."""
