"""int4 quantization: the precision of a group's values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loraplex.kernels.int4_quantized import GROUP, quantize_groups
from loraplex.kernels.quantize import WeightFormat, quantize


def rounded(weight: Tensor) -> Tensor:
    return quantize(weight, WeightFormat.INT4).dequantize()


@pytest.mark.parametrize("in_features", [1, 127, 128, 129, 300])
def test_rows_are_groups_of_128_columns_filled_up_with_zeros(in_features: int) -> None:
    quantized, scale = quantize_groups(torch.randn(5, in_features))
    num_groups = -(-in_features // GROUP)
    assert quantized.shape == (5, num_groups, GROUP)
    assert scale.shape == (5, num_groups)
    assert (quantized.dtype, scale.dtype) == (torch.int8, torch.bfloat16)
    assert not quantized.flatten(1)[:, in_features:].any()
    assert -8 <= quantized.min() <= quantized.max() <= 7


def test_no_scale_leaves_much_less_error_than_the_chosen_one() -> None:
    groups = torch.randn(50, GROUP) * torch.logspace(-6, 6, 50)[:, None]
    error = (rounded(groups) - groups).square().sum(dim=1)
    scales = groups.abs().amax(dim=1) / torch.linspace(5, 16, 300)[:, None]
    scales = torch.cat([scales, -scales])[..., None]
    tried = (groups / scales).round().clamp(-8, 7) * scales
    least = (tried - groups).square().sum(dim=2).amin(dim=0)
    assert (error / least).mean() < 1.1
    assert (error / least).max() < 1.3


def test_normal_weights_lose_a_tenth_at_most() -> None:
    weight = torch.randn(200, 4 * GROUP)
    assert (rounded(weight) - weight).norm() < 0.1 * weight.norm()


def test_a_weight_that_codes_stand_for_has_these_codes_again() -> None:
    weight = rounded(torch.randn(20, 300))
    assert torch.equal(rounded(weight), weight)


@pytest.mark.parametrize("size", [0.0, 1e-30, 3.0, 1e30])
def test_a_group_of_equal_values_is_kept_up_to_the_rounding_of_its_scale(size: float) -> None:
    weight = torch.full((2, GROUP), size)
    torch.testing.assert_close(rounded(weight), weight, rtol=2**-8, atol=0.0)


def test_one_groups_outlier_costs_only_its_own_group() -> None:
    weight = torch.randn(1, 2 * GROUP)
    other = rounded(weight)[:, GROUP:]
    weight[0, 5] = 1e4
    assert torch.equal(rounded(weight)[:, GROUP:], other)
