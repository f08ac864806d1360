"""The formats of `--quantize`: their errors, and codes found one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loraplex.kernels.int4_quantized import CLIPPING
from loraplex.kernels.quantize import E2M1_TABLE, NF4_TABLE, WeightFormat, quantize

ERRORS = {
    WeightFormat.INT8: 0.010,
    WeightFormat.INT4: 0.105,
    WeightFormat.FP8: 0.028,
    WeightFormat.NF4: 0.095,
    WeightFormat.MXFP4: 0.13,
}
"""Of normally distributed weights, relative to their norm."""
FREE_GROUPS = tuple(form for form in WeightFormat if form is not WeightFormat.MXFP4)
"""MXFP4 has groups of 32 by its specification."""
EACH_FORMAT = pytest.mark.parametrize("weight_format", WeightFormat)


@EACH_FORMAT
@pytest.mark.parametrize("size", [(256, 512), (3, 33), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_the_formats(
    weight_format: WeightFormat, size: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = torch.randn(size).to(dtype)
    found = quantize(weight, weight_format).dequantize()
    assert found.shape == weight.shape
    bound = ERRORS[weight_format] * (1 if weight.numel() > 1000 else 2)
    assert (found - weight.float()).norm() <= bound * weight.float().norm()


@EACH_FORMAT
def test_quantizing_a_dequantized_weight_changes_nothing(weight_format: WeightFormat) -> None:
    once = quantize(torch.randn(64, 256), weight_format).dequantize()
    again = quantize(once, weight_format).dequantize()
    torch.testing.assert_close(again, once, rtol=1e-6, atol=0)


@EACH_FORMAT
def test_zeros_stay_zeros_and_large_values_finite(weight_format: WeightFormat) -> None:
    weight = torch.zeros(4, 256)
    weight[1], weight[2, 5], weight[3] = 1e30, -3e4, 1e-30
    found = quantize(weight, weight_format).dequantize()
    assert found[0].eq(0).all()
    assert found.isfinite().all()
    assert (found[1] / weight[1] - 1).abs().max() < 0.5
    assert found[2].count_nonzero() == 1


@pytest.mark.parametrize(
    ("weight_format", "table", "group"),
    [(WeightFormat.NF4, NF4_TABLE, 64), (WeightFormat.MXFP4, E2M1_TABLE, 32)],
)
def test_each_code_is_the_nearest_of_its_table(
    weight_format: WeightFormat, table: tuple[float, ...], group: int
) -> None:
    weight = torch.randn(8, 4 * group)
    found = quantize(weight, weight_format)
    steps = weight / found.scale.float().repeat_interleave(group, dim=1)
    steps = steps.clamp(min(table), max(table))
    nearest = (steps[..., None] - torch.tensor(table)).abs().amin(dim=-1)
    chosen = (steps - torch.tensor(table)[found.codes.int()]).abs()
    torch.testing.assert_close(chosen, nearest)


def test_mxfp4_rounds_ties_to_even_and_scales_by_powers_of_two() -> None:
    """OCP Microscaling Formats 1.0, section 5.3: the largest number's exponent less 2."""
    ties = torch.tensor([4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0])
    weight = torch.zeros(1, 32)
    weight[0, : len(ties)] = ties
    found = quantize(weight, WeightFormat.MXFP4)
    assert found.scale.item() == 1.0
    expected = torch.tensor([4.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -4.0])
    assert torch.equal(found.dequantize()[0, : len(ties)], expected)
    assert quantize(8 * weight, WeightFormat.MXFP4).scale.item() == 8.0


@pytest.mark.parametrize("size", [16, 48, 128, 192, 0, 4096])
@pytest.mark.parametrize("weight_format", FREE_GROUPS)
def test_each_group_is_rounded_by_itself(weight_format: WeightFormat, size: int) -> None:
    weight = torch.randn(5, 200) * torch.logspace(-2, 2, 200)
    weight[3, :48] = 0
    found = quantize(weight, weight_format, size)
    groups = weight.split(size or 200, dim=1)
    assert found.scale.shape == (5, len(groups))
    expected = torch.cat([rounded_alone(group, weight_format) for group in groups], dim=1)
    torch.testing.assert_close(found.dequantize(), expected, rtol=1e-6, atol=0)


def rounded_alone(group: Tensor, weight_format: WeightFormat) -> Tensor:
    """The numbers of the codes of columns that share a scale in each row."""
    largest = group.abs().amax(dim=1, keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)
    match weight_format:
        case WeightFormat.INT8:
            return (group / (largest / 127)).round() * (largest / 127)
        case WeightFormat.FP8:
            return (group / (largest / 448)).to(torch.float8_e4m3fn).float() * (largest / 448)
        case WeightFormat.NF4:
            scale, table = largest.bfloat16().float(), torch.tensor(NF4_TABLE)
            return table[((group / scale)[..., None] - table).abs().argmin(dim=-1)] * scale
    assert weight_format is WeightFormat.INT4
    signed = group.gather(1, group.abs().argmax(dim=1, keepdim=True))
    scales = [(signed / -code).bfloat16().float() for code in CLIPPING]
    scales = [torch.where(scale == 0, 1.0, scale) for scale in scales]
    tried = torch.stack([(group / scale).round().clamp(-8, 7) * scale for scale in scales])
    best = (tried - group).square().sum(dim=2).argmin(dim=0)
    return tried[best, torch.arange(len(group))]
