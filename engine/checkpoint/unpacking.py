"""Unpacks a checkpoint's quantized weights into codes, scales and zero points.

Layouts, from the formats' own descriptions:

- GPTQ: words along the inputs, lowest bits first; version 1 stores each zero point less one.
- AWQ (gemm): words along the outputs; the eight outputs of a word lie in the order 0, 2, 4, 6, 1,
  3, 5, 7.
- compressed-tensors: words along the inputs, codes raised by half their range; of two e2m1 codes,
  the first in the lower half of a byte, NVFP4's scales divided by one for the whole weight.
- bitsandbytes: the first of two codes in the upper half of a byte; a block may end within a row.
- MXFP4: the first of two codes in the lower half of a byte; scales are exponents raised by 127.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...kernels.quantize import E2M1_TABLE, MXFP4_GROUP
from ...kernels.quantized_weight import CodeType, QuantizedWeight
from ..errors import DamagedBase
from .packed_weights import WORD_BITS, PackedWeight, Packing

Tensors = Mapping[str, Tensor]
_AWQ_OUTPUTS = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
"""The output that each four bits of a word belong to."""
_FP8_NAN = 0x7F
_PIECE_ROWS = 64
"""Rows of words that are unpacked at a time: in between, each number takes eight bytes."""


def unpack(weight: PackedWeight, tensors: Tensors) -> QuantizedWeight | Tensor:
    """The weight of these tensors, given by role: dense if no form of codes has its values.

    Raises DamagedBase for values that the format cannot have.
    """
    if weight.packing is Packing.MXFP4_EXPERTS:
        values = _mxfp4_experts(weight, tensors)
        _check_finite(weight, values)
        return values
    codes = tensors[codes_role(weight)]
    return RowUnpacker(weight, tensors, codes).unpack(range(weight.shape[0]))


def codes_role(weight: PackedWeight) -> str:
    """The role of the tensor of a matrix's codes, which is the large one."""
    return _FORMATS[weight.packing].codes_role


class Sliced(Protocol):
    """A tensor, or what reads slices of one from a file."""

    def __getitem__(self, index: Any, /) -> Tensor: ...


class RowUnpacker:
    """Unpacks rows of a matrix. Every selection of rows has the form of the whole matrix.

    Raises DamagedBase for values that the format cannot have.
    """

    def __init__(self, weight: PackedWeight, tensors: Tensors, codes: Sliced) -> None:
        """`tensors`: by role, all but the codes."""
        self._weight = weight
        self._codes = codes
        self._format = _FORMATS[weight.packing]
        self._rest = self._format.rest(weight, tensors)
        _check_finite(weight, self._rest.scale)

    def unpack(self, rows: range) -> QuantizedWeight | Tensor:
        """These adjacent rows: dense if no form of codes has their values."""
        rest = self._rest
        codes = self._format.codes(self._weight, self._codes, rows)
        if rest.block:
            return _by_blocks(codes, rows, rest)
        own = slice(rows.start, rows.stop)
        found = QuantizedWeight(
            rest.code_type,
            codes,
            rest.scale[own],
            rest.group,
            zero=None if rest.zero is None else rest.zero[own],
            table=rest.table,
        )
        groups = rest.groups
        return found if groups is None else _ordered(found, groups, self._weight.name)


def unpack_expert(weight: PackedWeight, tensors: Tensors) -> QuantizedWeight:
    """The matrix `[out, in]` of one of stacked experts, given its part of each tensor.

    Raises DamagedBase for values that the format cannot have.
    """
    assert weight.packing is Packing.MXFP4_EXPERTS
    expert = _mxfp4_expert(tensors["blocks"], tensors["scales"])
    _check_finite(weight, expert.scale)
    return expert


def _check_finite(weight: PackedWeight, scale: Tensor) -> None:
    if not scale.isfinite().all():
        raise DamagedBase(f"{weight.name}: its scales are not all finite: download it again")


class _Rest(NamedTuple):
    """All of a weight but its codes."""

    code_type: CodeType
    scale: Tensor
    """`[out, groups]`; of blocks that end within a row, the scale of each block."""
    group: int
    zero: Tensor | None = None
    """int8 `[out, groups]`."""
    table: Tensor | None = None
    groups: Tensor | None = None
    """The group of each input, if the file tells it."""
    block: int = 0
    """Codes of a block that ends within a row; 0: each row has whole groups."""


class _Format(NamedTuple):
    """How a matrix of one packing is unpacked."""

    codes_role: str
    rest: Callable[[PackedWeight, Tensors], _Rest]
    codes: Callable[[PackedWeight, Sliced, range], Tensor]
    """int8 `[rows, in]` of that tensor and the rows."""


def _gptq_rest(weight: PackedWeight, tensors: Tensors) -> _Rest:
    bits, out_features = weight.settings["bits"], weight.shape[0]
    zero = None
    if (zeros := tensors.get("qzeros")) is not None:
        zero = _numbers(zeros, bits, out_features).T
        if weight.settings["zeros_are_less_one"]:
            zero = (zero + 1) & ((1 << bits) - 1)
        zero = zero - _middle(weight)
    return _integers_rest(weight, tensors["scales"].T, zero, tensors.get("g_idx"))


def _gptq_codes(weight: PackedWeight, packed: Sliced, rows: range) -> Tensor:
    words = packed[:, rows.start : rows.stop].T
    return _centered(weight, _numbers(words, weight.settings["bits"], weight.shape[1]))


def _awq_rest(weight: PackedWeight, tensors: Tensors) -> _Rest:
    zero = _in_order(_numbers(tensors["qzeros"], 4, weight.shape[0])).T - 8
    return _integers_rest(weight, tensors["scales"].T, zero, None)


def _awq_codes(weight: PackedWeight, packed: Sliced, rows: range) -> Tensor:
    size = len(_AWQ_OUTPUTS)
    first, end = rows.start // size, -(-rows.stop // size)
    numbers = _in_order(_numbers(packed[:, first:end], 4, size * (end - first))).T
    return _centered(weight, numbers[rows.start - first * size :][: len(rows)])


def _packed_integers_rest(weight: PackedWeight, tensors: Tensors) -> _Rest:
    zero = None
    if (zeros := tensors.get("weight_zero_point")) is not None:
        numbers = _numbers(zeros.T, weight.settings["bits"], weight.shape[0])
        zero = numbers.T - _middle(weight)
    return _integers_rest(weight, tensors["weight_scale"], zero, tensors.get("weight_g_idx"))


def _packed_integers_codes(weight: PackedWeight, packed: Sliced, rows: range) -> Tensor:
    words = packed[rows.start : rows.stop]
    return _centered(weight, _numbers(words, weight.settings["bits"], weight.shape[1]))


def _middle(weight: PackedWeight) -> int:
    """The stored number that stands for 0."""
    return 1 << (int(weight.settings["bits"]) - 1)


def _centered(weight: PackedWeight, numbers: Tensor) -> Tensor:
    """int8 codes around 0."""
    return (numbers - _middle(weight)).to(torch.int8).contiguous()


def _integers_rest(
    weight: PackedWeight, scale: Tensor, zero: Tensor | None, groups: Tensor | None
) -> _Rest:
    """zero: `[out, groups]` around 0; None: all are 0."""
    return _Rest(
        CodeType.INT8 if weight.settings["bits"] > 4 else CodeType.INT4,
        scale.contiguous(),
        weight.settings["group"],
        zero=None if zero is None or not zero.any() else zero.to(torch.int8).contiguous(),
        groups=groups,
    )


def _ordered(weight: QuantizedWeight, groups: Tensor, name: str) -> QuantizedWeight | Tensor:
    """The weight whose input i is of group `groups[i]`; -1 everywhere: no order was stored."""
    in_features, num_groups = weight.shape[1], weight.scale.shape[1]
    groups = groups.long()
    plain = torch.arange(in_features) // weight.group
    if torch.equal(groups, plain) or bool((groups == -1).all()):
        return weight
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise DamagedBase(f"{name}: its g_idx names a group that it does not have")
    order = groups.argsort(stable=True)
    if torch.equal(groups[order], plain):
        return replace(weight, codes=weight.codes[:, order].contiguous(), order=order)
    # Groups of different sizes: each input gets its own scale, and the values stay exact.
    scale = weight.scale.float()[:, groups]
    zero = 0 if weight.zero is None else weight.zero.float()[:, groups]
    return (weight.values() - zero) * scale


def _scaled_rest(weight: PackedWeight, tensors: Tensors) -> _Rest:
    block = weight.settings["block"]
    scale, group = scale_by_group(_floats(tensors["scale"]), weight.shape, block)
    zero = tensors.get("weight_zero_point")
    if zero is not None:
        zero, _ = scale_by_group(zero, weight.shape, block)
    is_int8 = weight.settings["codes"] == "int8"
    return _Rest(
        CodeType.INT8 if is_int8 else CodeType.FP8,
        scale,
        group,
        zero=zero if zero is not None and bool(zero.any()) else None,
    )


def _scaled_codes(weight: PackedWeight, packed: Sliced, rows: range) -> Tensor:
    stored = packed[rows.start : rows.stop]
    codes, is_fp8 = stored.view(torch.int8), stored.dtype == torch.float8_e4m3fn
    if is_fp8 and bool(((codes & _FP8_NAN) == _FP8_NAN).any()):
        raise DamagedBase(f"{weight.name} has codes that are no numbers: download it again")
    return codes


def scale_by_group(
    scale: Tensor, shape: tuple[int, ...], block: tuple[int, int]
) -> tuple[Tensor, int]:
    """Scales `[out, groups]` and the inputs of a group."""
    out_features, in_features = shape
    if scale.numel() == 1 or scale.shape in ((out_features,), (out_features, 1)):
        return scale.reshape(-1, 1).expand(out_features, 1).contiguous(), in_features
    if len(scale) == out_features:
        return scale.contiguous(), in_features // scale.shape[1]
    return scale.repeat_interleave(block[0], dim=0)[:out_features].contiguous(), block[1]


def _bnb4_rest(weight: PackedWeight, tensors: Tensors) -> _Rest:
    (out_features, in_features), block = weight.shape, weight.settings["block"]
    scale = tensors["absmax"]
    if (nested := tensors.get("nested_absmax")) is not None:
        by_block = nested.repeat_interleave(weight.settings["nested_block"])
        scale = tensors["nested_quant_map"][scale.int()] * by_block[: len(scale)]
        scale = scale + weight.settings["nested_offset"]
    table = tensors["quant_map"]
    if in_features % block:
        return _Rest(CodeType.TABLE4, scale, in_features, table=table, block=block)
    return _Rest(CodeType.TABLE4, scale.view(out_features, -1), block, table=table)


def _bnb4_codes(weight: PackedWeight, packed: Sliced, rows: range) -> Tensor:
    in_features = weight.shape[1]
    first, end = rows.start * in_features, rows.stop * in_features
    bytes_ = packed[first // 2 : -(-end // 2)].flatten()
    codes = torch.stack([bytes_ >> 4, bytes_ & 15], dim=1).flatten()[first % 2 :]
    return codes[: end - first].view(-1, in_features).to(torch.int8)


def _by_blocks(codes: Tensor, rows: range, rest: _Rest) -> Tensor:
    """fp32 rows of a weight whose blocks end within rows."""
    assert rest.table is not None
    in_features = codes.shape[1]
    first, end = rows.start * in_features, rows.stop * in_features
    scale = rest.scale[first // rest.block : -(-end // rest.block)].repeat_interleave(rest.block)
    values = rest.table[codes.int()]
    values *= scale[first % rest.block :][: values.numel()].view_as(values)
    return values


def _bnb8_rest(weight: PackedWeight, tensors: Tensors) -> _Rest:
    scale = tensors["SCB"].float()[:, None] / 127
    return _Rest(CodeType.INT8, scale, weight.shape[1])


def _bnb8_codes(weight: PackedWeight, packed: Sliced, rows: range) -> Tensor:
    return packed[rows.start : rows.stop]


def _fp4_rest(weight: PackedWeight, tensors: Tensors) -> _Rest:
    scale = _floats(tensors["weight_scale"])
    if (total := tensors.get("weight_global_scale")) is not None:
        scale = scale / total
    group = weight.settings["group"]
    return _Rest(CodeType.TABLE4, scale, group, table=torch.tensor(E2M1_TABLE, dtype=torch.float32))


def _fp4_codes(weight: PackedWeight, packed: Sliced, rows: range) -> Tensor:
    return _e2m1_codes(packed[rows.start : rows.stop])


def _mxfp4_experts(weight: PackedWeight, tensors: Tensors) -> Tensor:
    """bf16 `[experts, in, out]`, which holds such numbers exactly."""
    values = torch.empty(weight.shape, dtype=torch.bfloat16)
    for expert, (blocks, scales) in enumerate(
        zip(tensors["blocks"], tensors["scales"], strict=True)
    ):
        values[expert] = _mxfp4_expert(blocks, scales).dequantize(torch.bfloat16).T
    return values


def _mxfp4_expert(blocks: Tensor, scales: Tensor) -> QuantizedWeight:
    """blocks: uint8 `[out, groups, 16]`; scales: uint8 `[out, groups]`."""
    return _e2m1(blocks.flatten(1), _floats(scales), MXFP4_GROUP)


def _e2m1(packed: Tensor, scale: Tensor, group: int) -> QuantizedWeight:
    """packed: uint8 `[out, in / 2]`; scale: `[out, groups]`."""
    table = torch.tensor(E2M1_TABLE, dtype=torch.float32)
    return QuantizedWeight(CodeType.TABLE4, _e2m1_codes(packed), scale, group, table=table)


def _e2m1_codes(packed: Tensor) -> Tensor:
    """int8 `[n, in]` of uint8 `[n, in / 2]`."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).to(torch.int8)


def _floats(scale: Tensor) -> Tensor:
    """Scales as numbers: bytes are exponents, raised by 127, whose powers bf16 holds; the largest
    one is no number."""
    if scale.dtype == torch.uint8:
        powers = (scale.float() - 127).exp2()
        return torch.where(scale < 255, powers, torch.nan).bfloat16()
    return scale.float() if scale.dtype == torch.float8_e4m3fn else scale


def _numbers(words: Tensor, bits: int, count: int) -> Tensor:
    """int16 `[n, count]` of `words [n, m]` of 32 bits: numbers of `bits` each, lowest bits first.

    Numbers whose bits do not divide a byte's may begin in one word and end in the next one.
    """
    if 8 % bits == 0:
        octets = words.contiguous().view(torch.uint8)
        parts = [octets >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)]
        return torch.stack(parts, dim=-1).flatten(1)[:, :count].to(torch.int16)
    places = torch.arange(count) * bits
    first, shift = places // WORD_BITS, places % WORD_BITS
    next_word = (first + 1).clamp(max=words.shape[1] - 1)
    is_divided = shift + bits > WORD_BITS
    pieces = []
    for piece in words.split(_PIECE_ROWS):
        wide = piece.contiguous().view(torch.uint32).to(torch.int64)
        numbers = wide[:, first] >> shift
        if bool(is_divided.any()):
            numbers |= torch.where(is_divided, wide[:, next_word] << (WORD_BITS - shift), 0)
        pieces.append((numbers & ((1 << bits) - 1)).to(torch.int16))
    return torch.cat(pieces)


def _in_order(numbers: Tensor) -> Tensor:
    """`[n, outputs]` of AWQ's order of outputs."""
    words = numbers.unflatten(1, (-1, len(_AWQ_OUTPUTS)))
    ordered = torch.empty_like(words)
    ordered[..., _AWQ_OUTPUTS] = words
    return ordered.flatten(1)


_FORMATS = {
    Packing.GPTQ: _Format("qweight", _gptq_rest, _gptq_codes),
    Packing.AWQ: _Format("qweight", _awq_rest, _awq_codes),
    Packing.PACKED_INTEGERS: _Format(
        "weight_packed", _packed_integers_rest, _packed_integers_codes
    ),
    Packing.SCALED: _Format("weight", _scaled_rest, _scaled_codes),
    Packing.BNB4: _Format("weight", _bnb4_rest, _bnb4_codes),
    Packing.BNB8: _Format("weight", _bnb8_rest, _bnb8_codes),
    Packing.FP4: _Format("weight_packed", _fp4_rest, _fp4_codes),
}
"""Of all packings but that of stacked experts."""
