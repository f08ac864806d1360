"""The formats of `--quantize`: their errors, and codes found one by one."""

from __future__ import annotations

import pytest
import torch

from loraplex.kernels.quantize import E2M1_TABLE, NF4_TABLE, WeightFormat, quantize

ERRORS = {
    WeightFormat.INT8: 0.010,
    WeightFormat.INT4: 0.105,
    WeightFormat.FP8: 0.028,
    WeightFormat.NF4: 0.095,
    WeightFormat.MXFP4: 0.13,
}
"""Of normally distributed weights, relative to their norm."""
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
