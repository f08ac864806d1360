"""Triton matmuls of quantized weights with activations of 16 or 32 bits.

The weight is the left operand, `y.T = W @ x.T`: codes go from memory to registers, are converted
there exactly to x's dtype (the numbers of a table are rounded to it), and are multiplied. Scales
are applied to fp32 sums. Zero points, whatever numbers they are, change a group's sum by a product
with the sum of x over the group. Those products are computed in fp32, apart from the codes: beside
them they took most registers.

With few rows, reading the codes determines the time, so several programs may split in_features
(`splits`). Each writes its sum to its own place, and a second kernel adds the sums in order: no
atomics, always the same result. Rows of x are columns of one product, so no row changes another's
result. With many rows it is faster to dequantize the weight and leave the product to PyTorch
(`dequantize_weight`).

Launches depend on shapes only and do not synchronize, so they can be captured.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .wna16_weight import WORD_BITS, WNA16Weight

MAX_SPLITS = 8
MIN_SPLIT_COLUMNS = 1024
"""Columns that are worth a program."""
ZERO_BLOCK = tl.constexpr(16)
"""Groups whose zero points are multiplied at once: the least columns of a `tl.dot`."""
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
FP8_TO_BF16 = tl.constexpr("""{
    .reg .b32 moved, sign, number, scale, zero;
    mov.b32 scale, 0x7B807B80;
    mov.b32 zero, 0x80008000;
    shl.b32 moved, $2, 8;
    and.b32 sign, moved, 0x80008000;
    shl.b32 moved, $2, 4;
    lop3.b32 number, moved, 0x07F007F0, sign, 0xEA;
    fma.rn.bf16x2 $0, number, scale, zero;
    and.b32 sign, $2, 0x80008000;
    shr.b32 moved, $2, 4;
    lop3.b32 number, moved, 0x07F007F0, sign, 0xEA;
    fma.rn.bf16x2 $1, number, scale, zero;
}""")
"""Two words at once. A code's exponent and mantissa in the places of bf16's are the number over
2^120 (0x7B80), subnormal or not. sm_80 has no conversion from fp8 and no product of bf16, so -0 is
added."""


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
    x: Tensor, weight: WNA16Weight, bias: Tensor | None, *, launch: Launch | None = None
) -> Tensor:
    """`x @ W.T + bias`: `[rows, out]` in x's type.

    x: `[rows, in]`, its rows dense.
    launch: how to divide the product, instead of the measured way.
    """
    num_rows, in_features = x.shape
    num_units, out_features = weight.num_units, weight.out_features
    y = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    launch = launch or choose_launch(num_rows, out_features, in_features, x.dtype)
    sums = y
    if launch.splits > 1:
        sums = torch.empty(launch.splits, *y.shape, dtype=torch.float32, device=x.device)
    row_tiles = triton.cdiv(num_rows, launch.block_rows)
    wna16_kernel[(row_tiles * triton.cdiv(out_features, launch.block_out), launch.splits)](
        sums,
        x,
        weight.words,
        weight.scale,
        weight.zero,
        None if weight.zero is None else group_sums(x, weight),
        weight.table,
        bias if sums is y else None,
        num_rows,
        in_features,
        out_features,
        num_units,
        triton.cdiv(num_units, launch.splits),
        x.stride(0),
        row_tiles,
        **wna16_constants(weight, launch),
        **launch.options,
    )
    if sums is not y:
        _add_splits(sums, bias, y)
    return y


def group_sums(x: Tensor, weight: WNA16Weight) -> Tensor:
    """fp32 `[rows, groups]`: the sums of x over the columns of each group."""
    assert weight.group is not None
    padding = weight.num_units * weight.unit - weight.in_features
    columns = F.pad(x, (0, padding)) if padding else x
    sums: Tensor = columns.unflatten(1, (-1, weight.group)).sum(dim=2, dtype=torch.float32)
    return sums


def _add_splits(sums: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Set y to the sum of `sums [splits, rows, out]` and the bias."""
    constants = sum_constants(len(sums))
    grid = (triton.cdiv(y.numel(), SUM_BLOCK),)
    sum_kernel[grid](y, sums, bias, y.numel(), y.shape[1], **constants, **SUM_OPTIONS)


def dequantize_weight(weight: WNA16Weight, dtype: torch.dtype) -> Tensor:
    """`[out, in]`: each element computed in fp32 and rounded once to dtype."""
    out_features, in_features = weight.out_features, weight.in_features
    dense = torch.empty(out_features, in_features, dtype=dtype, device=weight.words.device)
    blocks = triton.cdiv(out_features, DEQUANTIZE_BLOCK_OUT)
    dequantize_kernel[(weight.num_units, blocks)](
        dense,
        weight.words,
        weight.scale,
        weight.zero,
        weight.table,
        in_features,
        out_features,
        **dequantize_constants(weight),
        **DEQUANTIZE_OPTIONS,
    )
    return dense


@cache
def choose_launch(num_rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> Launch:
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
    limit = min(MAX_SPLITS, max_programs // num_tiles, in_features // MIN_SPLIT_COLUMNS)
    return launch._replace(splits=1 << max(limit, 1).bit_length() - 1)


def wna16_constants(weight: WNA16Weight, launch: Launch) -> dict[str, Any]:
    """The compile-time values of `wna16_kernel`."""
    return {
        **_form_constants(weight),
        "HAS_TAIL": weight.in_features % weight.unit != 0,
        "BLOCK_OUT": launch.block_out,
        "BLOCK_ROWS": launch.block_rows,
    }


def sum_constants(splits: int) -> dict[str, Any]:
    """The compile-time values of `sum_kernel`."""
    return {"SPLITS": splits, "BLOCK": SUM_BLOCK}


def dequantize_constants(weight: WNA16Weight) -> dict[str, Any]:
    """The compile-time values of `dequantize_kernel`."""
    return {**_form_constants(weight), "BLOCK_OUT": DEQUANTIZE_BLOCK_OUT}


def _form_constants(weight: WNA16Weight) -> dict[str, Any]:
    return {
        "CODES": str(weight.code_type),
        "PARTS": WORD_BITS // weight.code_type.bits,
        "NUM_WORDS": weight.words.shape[2],
        "GROUP": weight.group,
        "PLAIN": INTERPRETED,
    }


@triton.jit(do_not_specialize=["num_rows", "num_units", "per_split", "row_tiles"])
def wna16_kernel(
    y_ptr: tl.tensor,  # [num_rows, out], or fp32 [splits, num_rows, out]
    x_ptr: tl.tensor,
    words_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,  # or None
    sums_ptr: tl.tensor,  # of x over each group: fp32 [num_rows, groups], or None
    table_ptr: tl.tensor,  # or None
    bias_ptr: tl.tensor,  # or None
    num_rows: int,
    in_features: int,
    out_features: int,
    num_units: int,
    per_split: int,
    x_stride: int,
    row_tiles: int,
    CODES: tl.constexpr,
    PARTS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PLAIN: tl.constexpr,
) -> None:
    """One tile of y.T, over one split's units."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    outs = tile // row_tiles * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = tile % row_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_out = outs < out_features
    in_rows = rows < num_rows
    first = split * per_split
    total = sum_units(
        x_ptr,
        words_ptr,
        scale_ptr,
        zero_ptr,
        sums_ptr,
        table_ptr,
        outs,
        rows,
        in_rows,
        first,
        tl.minimum(first + per_split, num_units),
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
    if bias_ptr is not None:
        total += _load_outs(bias_ptr, 0, outs, out_features)[:, None]
    y_rows = (split.to(tl.int64) * num_rows + rows) * out_features
    y_mask = in_out[:, None] & in_rows[None, :]
    y_ptrs = y_ptr + y_rows[None, :] + outs[:, None]
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=y_mask)


@triton.jit
def sum_units(
    x_ptr: tl.tensor,
    words_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    table_ptr: tl.tensor,
    outs: tl.tensor,
    rows: tl.tensor,
    in_rows: tl.tensor,
    first: int,
    last: int,
    in_features: int,
    out_features: int,
    num_units: int,
    x_stride: int,
    CODES: tl.constexpr,
    PARTS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PLAIN: tl.constexpr,
) -> tl.tensor:
    """fp32 `[BLOCK_OUT, BLOCK_ROWS]`: the outs of W @ x.T for the rows of x, over the units from
    `first` to before `last`. Pointers as in `wna16_kernel`."""
    in_out = outs < out_features
    UNIT: tl.constexpr = NUM_WORDS * PARTS
    places = tl.arange(0, NUM_WORDS)
    unit_words = tl.cast(out_features, tl.int64) * NUM_WORDS
    word_ptrs = words_ptr + outs.to(tl.int64)[:, None] * NUM_WORDS + places[None, :]
    x_ptrs = x_ptr + rows.to(tl.int64)[None, :] * x_stride + places[:, None]
    total = tl.full((BLOCK_OUT, BLOCK_ROWS), 0.0, dtype=tl.float32)
    if zero_ptr is not None:  # a group's sum is scale × (q · x - zero × sum(x))
        GROUPS: tl.constexpr = UNIT // GROUP
        for start in range(first * GROUPS, last * GROUPS, ZERO_BLOCK):
            groups = start + tl.arange(0, ZERO_BLOCK)
            in_groups = groups < last * GROUPS
            zero_mask = in_out[:, None] & in_groups[None, :]
            zero_places = groups[None, :] * out_features + outs[:, None]
            zero = tl.load(zero_ptr + zero_places, mask=zero_mask, other=0).to(tl.float32)
            scale = tl.load(scale_ptr + zero_places, mask=zero_mask, other=0.0).to(tl.float32)
            sum_ptrs = sums_ptr + rows[None, :] * (num_units * GROUPS) + groups[:, None]
            sums = tl.load(sum_ptrs, mask=in_rows[None, :] & in_groups[:, None], other=0.0)
            total = tl.dot(-zero * scale, sums, total, input_precision="ieee")
    for unit in range(first, last):
        words = tl.load(word_ptrs + unit * unit_words, mask=in_out[:, None], other=0)
        start = unit * UNIT
        columns = start + places[:, None]
        end = in_features if HAS_TAIL else None
        weights = _numbers(words, table_ptr, CODES, x_ptr.dtype.element_ty, PLAIN)
        if GROUP is None:
            for part in tl.static_range(PARTS):
                total = _add(
                    weights[part], x_ptrs + start, part * NUM_WORDS, in_rows, columns, end, total
                )
        else:
            for part in tl.static_range(PARTS):
                group = unit * (UNIT // GROUP) + part * NUM_WORDS // GROUP
                if part * NUM_WORDS % GROUP == 0:
                    product = tl.full((BLOCK_OUT, BLOCK_ROWS), 0.0, dtype=tl.float32)
                product = _add(
                    weights[part], x_ptrs + start, part * NUM_WORDS, in_rows, columns, end, product
                )
                if (part + 1) * NUM_WORDS % GROUP == 0:
                    scale = _load_outs(scale_ptr, group, outs, out_features)
                    total += product * scale[:, None]
    if GROUP is None:
        total *= _load_outs(scale_ptr, 0, outs, out_features)[:, None]
    return total


@triton.jit
def _load_outs(
    ptr: tl.tensor,  # [rows, out]
    row: int,
    outs: tl.tensor,
    out_features: int,
) -> tl.tensor:
    """The elements of these outs in one row, in fp32."""
    return tl.load(ptr + row * out_features + outs, mask=outs < out_features, other=0).to(
        tl.float32
    )


@triton.jit
def _add(
    weight: tl.tensor,
    x_ptrs: tl.tensor,
    first: tl.constexpr,
    in_rows: tl.tensor,
    columns: tl.tensor,  # of x_ptrs
    end: tl.tensor | None,  # how many columns x has, if they may end in this unit
    total: tl.tensor,
) -> tl.tensor:
    """total + weight @ x.T of one part of a unit, whose columns begin `first` after x_ptrs."""
    mask = in_rows[None, :]
    if end is not None:
        mask = mask & (columns + first < end)
    x = tl.load(x_ptrs + first, mask=mask, other=0.0)
    return tl.dot(weight, x.to(weight.dtype), total, input_precision="ieee")


@triton.jit
def _numbers(
    words: tl.tensor,
    table_ptr: tl.tensor,
    CODES: tl.constexpr,
    dtype: tl.constexpr,
    PLAIN: tl.constexpr,
) -> Any:
    """A tensor for each part: its codes as numbers of x's type."""
    if CODES == "int8":
        return _int8_parts(words, dtype, PLAIN)
    elif CODES == "fp8":
        return _fp8_parts(words, dtype, PLAIN)
    elif CODES == "int4":
        return _int4_parts(words, dtype, PLAIN)
    else:
        return _table4_parts(words, table_ptr, dtype, PLAIN)


@triton.jit
def _int8_parts(
    words: tl.tensor, dtype: tl.constexpr, PLAIN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The words' two codes as numbers of x's type."""
    if dtype == tl.bfloat16 and not PLAIN:
        w0, w1 = tl.inline_asm_elementwise(
            INT8_TO_BF16,
            "=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        number: tl.constexpr = tl.float32 if PLAIN else dtype
        w0 = ((words << 8) >> 8).to(number)
        w1 = (words >> 8).to(number)
    return w0, w1


@triton.jit
def _int4_parts(
    words: tl.tensor, dtype: tl.constexpr, PLAIN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The words' four codes as numbers of x's type."""
    if dtype == tl.bfloat16 and not PLAIN:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            INT4_TO_BF16,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        number: tl.constexpr = tl.float32 if PLAIN else dtype
        w0 = ((words << 12) >> 12).to(number)
        w1 = ((words << 8) >> 12).to(number)
        w2 = ((words << 4) >> 12).to(number)
        w3 = (words >> 12).to(number)
    return w0, w1, w2, w3


@triton.jit
def _fp8_parts(
    words: tl.tensor, dtype: tl.constexpr, PLAIN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The words' two codes as numbers of x's type. A code that is NaN becomes ±480."""
    if dtype == tl.bfloat16 and not PLAIN:
        w0, w1 = tl.inline_asm_elementwise(
            FP8_TO_BF16,
            "=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        number: tl.constexpr = tl.float32 if PLAIN else dtype
        w0 = _fp16_of_fp8(words << 8).to(number)
        w1 = _fp16_of_fp8(words).to(number)
    return w0, w1


@triton.jit
def _fp16_of_fp8(words: tl.tensor) -> tl.tensor:
    """The numbers of the words' upper bytes, exactly."""
    # In the places of fp16's exponent and mantissa a code's are the number over 256.
    bits = (words & -0x8000) | ((words >> 1) & 0x3F80)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _table4_parts(
    words: tl.tensor, table_ptr: tl.tensor, dtype: tl.constexpr, PLAIN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The words' four numbers in x's type. The table stays in L1: one line, so no bank conflict."""
    number: tl.constexpr = tl.float32 if PLAIN else dtype
    w0 = tl.load(table_ptr + (words & 15)).to(number)
    w1 = tl.load(table_ptr + ((words >> 4) & 15)).to(number)
    w2 = tl.load(table_ptr + ((words >> 8) & 15)).to(number)
    w3 = tl.load(table_ptr + ((words >> 12) & 15)).to(number)
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
    dense_ptr: tl.tensor,  # [out, in]
    words_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,  # or None
    table_ptr: tl.tensor,  # or None
    in_features: int,
    out_features: int,
    CODES: tl.constexpr,
    PARTS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    PLAIN: tl.constexpr,
) -> None:
    """One unit's columns in a block of rows."""
    unit = tl.program_id(0)
    outs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    in_out = outs < out_features
    UNIT: tl.constexpr = NUM_WORDS * PARTS
    places = tl.arange(0, NUM_WORDS)
    word_rows = (unit.to(tl.int64) * out_features + outs) * NUM_WORDS
    words = tl.load(words_ptr + word_rows[:, None] + places, mask=in_out[:, None], other=0)
    columns = unit * UNIT + places[None, :]
    dense_ptrs = dense_ptr + outs.to(tl.int64)[:, None] * in_features + columns
    weights = _numbers(words, table_ptr, CODES, tl.float32, PLAIN)
    for part in tl.static_range(PARTS):
        group = 0 if GROUP is None else unit * (UNIT // GROUP) + part * NUM_WORDS // GROUP
        weight = weights[part]
        if zero_ptr is not None:
            weight -= _load_outs(zero_ptr, group, outs, out_features)[:, None]
        weight *= _load_outs(scale_ptr, group, outs, out_features)[:, None]
        mask = in_out[:, None] & (columns + part * NUM_WORDS < in_features)
        tl.store(dense_ptrs + part * NUM_WORDS, weight.to(dense_ptr.dtype.element_ty), mask=mask)


INTERPRETED = not isinstance(wna16_kernel, triton.JITFunction)
"""Under TRITON_INTERPRET=1, where tl.dot of bf16 is wrong: dots are computed in fp32 then."""
