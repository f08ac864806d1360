"""Quantizes weights while a base is loaded: the formats of `--quantize`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from .int4_quantized import GROUP, quantize_groups
from .int8_linear import quantize_rows
from .quantized_weight import CodeType, QuantizedWeight

_PIECE_ROWS = 256
"""Rows that become codes at a time: in fp32 they take four to eight times the codes' bytes."""
NF4_GROUP, MXFP4_GROUP = 64, 32
MAX_FP8, MAX_MXFP4 = 448.0, 6.0


class WeightFormat(StrEnum):
    """A way to quantize a weight without calibration: a scale per output and group of inputs."""

    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
    """e4m3 numbers."""
    NF4 = "nf4"
    """Quantiles of the normal distribution (QLoRA, Dettmers et al. 2023, appendix E)."""
    MXFP4 = "mxfp4"
    """e2m1 numbers; scales are powers of two (OCP Microscaling Formats 1.0)."""


GROUP_SIZES: Mapping[WeightFormat, int] = {
    WeightFormat.INT8: 0,
    WeightFormat.INT4: GROUP,
    WeightFormat.FP8: 0,
    WeightFormat.NF4: NF4_GROUP,
    WeightFormat.MXFP4: MXFP4_GROUP,
}
"""The inputs that share a scale, where nothing else is asked for; 0: all of them."""


NF4_TABLE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
E2M1_TABLE = tuple(
    sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
)
"""The numbers of a sign, two bits of exponent and one of fraction, by their bits."""


def quantize(
    weight: Tensor, weight_format: WeightFormat, group_size: int | None = None
) -> QuantizedWeight:
    """`weight [out, in]` of any float type, on its device.

    `group_size`: the inputs that share a scale, of which the last group may have fewer; 0: all of
    them; None: as in `GROUP_SIZES`.
    """
    in_features = weight.shape[1]
    size = GROUP_SIZES[weight_format] if group_size is None else group_size
    group = min(size or in_features, in_features)
    match weight_format:
        case WeightFormat.INT8:
            return _by_pieces(weight, _to_int8, CodeType.INT8, group)
        case WeightFormat.INT4:
            codes, scale = quantize_groups(weight, group)
            return QuantizedWeight(CodeType.INT4, codes.flatten(1)[:, :in_features], scale, group)
        case WeightFormat.FP8:
            return _by_pieces(weight, _to_fp8, CodeType.FP8, group)
        case WeightFormat.NF4:
            return _by_pieces(weight, _to_nf4, CodeType.TABLE4, group, NF4_TABLE)
        case WeightFormat.MXFP4:
            return _by_pieces(weight, _to_mxfp4, CodeType.TABLE4, group, E2M1_TABLE)


def _by_pieces(
    weight: Tensor,
    convert: Callable[[Tensor], tuple[Tensor, Tensor]],
    code_type: CodeType,
    group: int,
    table: Sequence[float] | None = None,
) -> QuantizedWeight:
    """convert: fp32 `[n, groups, group]` to codes of this shape and scales `[n, groups]`."""
    in_features = weight.shape[1]
    codes, scales = [], []
    for rows in weight.split(_PIECE_ROWS):
        numbers = rows.float().contiguous()  # a Conv1D's are not
        groups = F.pad(numbers, (0, -in_features % group)).unflatten(1, (-1, group))
        piece, scale = convert(groups)
        codes.append(piece.flatten(1)[:, :in_features])
        scales.append(scale)
    stored = None if table is None else weight.new_tensor(table, dtype=torch.float32)
    return QuantizedWeight(code_type, torch.cat(codes), torch.cat(scales), group, table=stored)


def _to_int8(groups: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = quantize_rows(groups)
    return codes, scale.squeeze(-1)


def _to_fp8(groups: Tensor) -> tuple[Tensor, Tensor]:
    scale = _above_zero(groups.abs().amax(dim=-1) / MAX_FP8)
    numbers = (groups / scale[..., None]).clamp(-MAX_FP8, MAX_FP8)
    return numbers.to(torch.float8_e4m3fn).view(torch.int8), scale


def _to_nf4(groups: Tensor) -> tuple[Tensor, Tensor]:
    scale = _above_zero(groups.abs().amax(dim=-1)).bfloat16()
    table = torch.tensor(NF4_TABLE, device=groups.device, dtype=torch.float32)
    return _nearest(groups / scale.float()[..., None], table), scale


def _to_mxfp4(groups: Tensor) -> tuple[Tensor, Tensor]:
    exponent = _above_zero(groups.abs().amax(dim=-1)).log2().floor() - 2
    scale = exponent.clamp(-126, 127).exp2()
    numbers = groups / scale[..., None]
    sizes = torch.tensor(E2M1_TABLE[:8], device=groups.device, dtype=torch.float32)
    return _nearest(numbers.abs(), sizes) + 8 * (numbers < 0).to(torch.int8), scale.bfloat16()


def _nearest(numbers: Tensor, table: Tensor) -> Tensor:
    """int8 places of the nearest entries of an ascending table; of two, the one with an even place,
    which for e2m1 is the one whose last bit is 0."""
    middles = (table[1:] + table[:-1]) / 2
    low, high = (torch.bucketize(numbers, middles, right=right) for right in (False, True))
    return torch.where(low % 2 == 0, low, high).to(torch.int8)


def _above_zero(scale: Tensor) -> Tensor:
    """A group of zeros gets the scale 1."""
    return torch.where(scale > 0, scale, 1.0)
