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
    unpackers: Mapping[Packing, Callable[..., QuantizedWeight | Tensor]] = {
        Packing.GPTQ: _gptq,
        Packing.AWQ: _awq,
        Packing.PACKED_INTEGERS: _packed_integers,
        Packing.SCALED: _scaled,
        Packing.BNB4: _bnb4,
        Packing.BNB8: _bnb8,
        Packing.FP4: _fp4,
        Packing.MXFP4_EXPERTS: _mxfp4_experts,
    }
    unpacked = unpackers[weight.packing](weight, tensors)
    _check_finite(weight, unpacked.scale if isinstance(unpacked, QuantizedWeight) else unpacked)
    return unpacked


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


def _gptq(weight: PackedWeight, tensors: Tensors) -> QuantizedWeight | Tensor:
    bits, (out_features, in_features) = weight.settings["bits"], weight.shape
    codes = _numbers(tensors["qweight"].T, bits, in_features)
    middle = 1 << (bits - 1)
    zero = torch.tensor(middle)
    if "qzeros" in tensors:
        zero = _numbers(tensors["qzeros"], bits, out_features).T
        if weight.settings["zeros_are_less_one"]:
            zero = (zero + 1) & ((1 << bits) - 1)
    return _integers(weight, codes - middle, tensors["scales"].T, zero - middle, tensors, "g_idx")


def _awq(weight: PackedWeight, tensors: Tensors) -> QuantizedWeight | Tensor:
    out_features = weight.shape[0]
    codes = _numbers(tensors["qweight"], 4, out_features)
    zero = _numbers(tensors["qzeros"], 4, out_features)
    codes, zero = (_in_order(numbers).T - 8 for numbers in (codes, zero))
    return _integers(weight, codes, tensors["scales"].T, zero, tensors, "")


def _packed_integers(weight: PackedWeight, tensors: Tensors) -> QuantizedWeight | Tensor:
    bits, (out_features, in_features) = weight.settings["bits"], weight.shape
    middle = 1 << (bits - 1)
    codes = _numbers(tensors["weight_packed"], bits, in_features) - middle
    zero = torch.tensor(0)
    if "weight_zero_point" in tensors:
        zero = _numbers(tensors["weight_zero_point"].T, bits, out_features).T - middle
    return _integers(weight, codes, tensors["weight_scale"], zero, tensors, "weight_g_idx")


def _integers(
    weight: PackedWeight, codes: Tensor, scale: Tensor, zero: Tensor, tensors: Tensors, order: str
) -> QuantizedWeight | Tensor:
    """codes: int16 `[out, in]`, zero `[out, groups]` or one number, both around 0."""
    found = QuantizedWeight(
        CodeType.INT8 if weight.settings["bits"] > 4 else CodeType.INT4,
        codes.to(torch.int8).contiguous(),
        scale.contiguous(),
        weight.settings["group"],
        zero=zero.to(torch.int8).expand(scale.shape).contiguous() if zero.any() else None,
    )
    groups = tensors.get(order)
    return found if groups is None else _ordered(found, groups, weight.name)


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


def _scaled(weight: PackedWeight, tensors: Tensors) -> QuantizedWeight:
    codes, scale = tensors["weight"], tensors["scale"]
    is_fp8 = codes.dtype == torch.float8_e4m3fn
    codes = codes.view(torch.int8)
    if is_fp8 and bool(((codes & _FP8_NAN) == _FP8_NAN).any()):
        raise DamagedBase(f"{weight.name} has codes that are no numbers: download it again")
    scale, group = scale_by_group(_floats(scale), weight.shape, weight.settings["block"])
    zero = tensors.get("weight_zero_point")
    if zero is not None:
        zero, _ = scale_by_group(zero, weight.shape, weight.settings["block"])
    return QuantizedWeight(
        CodeType.FP8 if is_fp8 else CodeType.INT8,
        codes,
        scale,
        group,
        zero=zero if zero is not None and bool(zero.any()) else None,
    )


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


def _bnb4(weight: PackedWeight, tensors: Tensors) -> QuantizedWeight | Tensor:
    (out_features, in_features), block = weight.shape, weight.settings["block"]
    bytes_ = tensors["weight"].flatten()
    codes = torch.stack([bytes_ >> 4, bytes_ & 15], dim=1).flatten()[: out_features * in_features]
    scale = tensors["absmax"]
    if "nested_absmax" in tensors:
        nested = tensors["nested_absmax"].repeat_interleave(weight.settings["nested_block"])
        scale = tensors["nested_quant_map"][scale.int()] * nested[: len(scale)]
        scale = scale + weight.settings["nested_offset"]
    if in_features % block:  # blocks that end within a row
        values = tensors["quant_map"][codes.int()]
        values *= scale.repeat_interleave(block)[: len(values)]
        return values.view(out_features, in_features)
    return QuantizedWeight(
        CodeType.TABLE4,
        codes.view(out_features, in_features).to(torch.int8),
        scale.view(out_features, -1),
        block,
        table=tensors["quant_map"],
    )


def _bnb8(weight: PackedWeight, tensors: Tensors) -> QuantizedWeight:
    scale = tensors["SCB"].float()[:, None] / 127
    return QuantizedWeight(CodeType.INT8, tensors["weight"], scale, group=weight.shape[1])


def _fp4(weight: PackedWeight, tensors: Tensors) -> QuantizedWeight:
    scale = _floats(tensors["weight_scale"])
    if "weight_global_scale" in tensors:
        scale = scale / tensors["weight_global_scale"]
    return _e2m1(tensors["weight_packed"], scale, weight.settings["group"])


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
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).to(torch.int8)
    return QuantizedWeight(CodeType.TABLE4, codes, scale, group, table=torch.tensor(E2M1_TABLE))


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
