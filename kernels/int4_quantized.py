"""int4 quantization: a weight's rows in groups of columns, each with its own scale.

    w[o, c] ≈ codes[o, c] × scale[o, group of c],   codes in -8..7

There is no zero point: the sign of the scale puts the group's largest value at -8, so that all 16
codes are used. Scales are bfloat16 values, which every device multiplies in the same way.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 128
"""Columns that share a scale, where nothing else is asked for."""
MIN_CODE, MAX_CODE = -8, 7
CLIPPING = (7.0, 8.0, 9.1, 10.2, 11.3, 12.5)
"""Candidates for the code of a group's largest value. Beyond -8 it is clipped, which gives the many
small values finer steps. For normally distributed weights the best candidate leaves a sixth less
error than the plain 7 (9.9 % instead of 11.8 %). With 7 and 8 among the candidates, quantizing a
dequantized weight gives the same codes."""
_PIECE_ROWS = 64


def quantize_groups(weight: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """int8 codes `[out, groups, group]` and bf16 scales `[out, groups]` of `weight [out, in]`.

    Of each group the scale with the least squared error. Columns beyond `in` have codes of zero.
    """
    pieces = [_quantize(_grouped(rows, group)) for rows in weight.split(_PIECE_ROWS)]
    return torch.cat([quantized for quantized, _ in pieces]), torch.cat(
        [scale for _, scale in pieces]
    )


def _grouped(rows: Tensor, group: int) -> Tensor:
    """fp32 `[n, groups, group]` of `rows [n, in]`, filled up with zeros."""
    return F.pad(rows.float(), (0, -rows.shape[1] % group)).view(len(rows), -1, group)


def _quantize(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of `groups [..., group]` in fp32."""
    largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
    best_scale, best_error = torch.ones_like(largest), torch.full_like(largest, torch.inf)
    for code in CLIPPING:
        scale = (largest / -code).bfloat16().float()
        steps = groups / scale
        error = (_quantized(steps) - steps).square().sum(dim=-1, keepdim=True)
        error *= (scale / largest).square()
        is_better = error < best_error  # never for a group of zeros, whose scale stays 1
        best_scale = torch.where(is_better, scale, best_scale)
        best_error = torch.where(is_better, error, best_error)
    return _quantized(groups / best_scale).to(torch.int8), best_scale.squeeze(-1).bfloat16()


def _quantized(steps: Tensor) -> Tensor:
    return steps.round().clamp_(MIN_CODE, MAX_CODE)
