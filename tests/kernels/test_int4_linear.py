"""int4 on the CPU: PyTorch's packed kernel compared with the dequantized weight."""

from __future__ import annotations

import pytest
import torch

from loraplex.kernels.int4_linear import Int4Linear
from loraplex.kernels.int4_quantized import int4_linear_reference

BF16 = 2**-8
"""The rounding of a product and, over many, that of the activations."""


@pytest.mark.parametrize(
    ("in_features", "out_features"), [(1, 1), (63, 133), (133, 63), (300, 48), (128, 64)], ids=str
)
@pytest.mark.parametrize("num_rows", [1, 4, 63])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_reference(
    in_features: int, out_features: int, num_rows: int, has_bias: bool, dtype: torch.dtype
) -> None:
    weight = torch.randn(out_features, in_features).to(dtype)
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    x = torch.randn(num_rows, in_features).to(dtype)
    result = Int4Linear(weight, bias)(x)
    expected = int4_linear_reference(x, weight, bias)
    assert result.dtype == dtype
    assert (result - expected).abs().max() <= 3 * BF16 * expected.abs().max()


def test_keeps_leading_dimensions() -> None:
    linear, x = Int4Linear(torch.randn(20, 30), torch.randn(20)), torch.randn(2, 3, 30)
    assert linear(x).shape == (2, 3, 20)
    assert torch.equal(linear(x)[1], linear(x[1]))


def test_holds_half_a_byte_per_weight_and_a_scale_per_group() -> None:
    num_scales = 32 * 2
    assert Int4Linear(torch.randn(32, 256)).weight_bytes == 32 * 256 // 2 + num_scales * (2 + 2)


@pytest.mark.parametrize("poison", [torch.inf, torch.nan, 3e38])
@pytest.mark.parametrize("num_rows", [2, 5, 40])
def test_keeps_one_rows_outlier_in_its_row(poison: float, num_rows: int) -> None:
    linear, x = Int4Linear(torch.randn(33, 200)), torch.randn(num_rows, 200)
    clean = linear(x)
    x[-1, 7] = poison
    result = linear(x)
    assert torch.equal(result[:-1], clean[:-1])
    if poison != 3e38:
        assert not result[-1].isfinite().any()


def test_gives_the_bias_for_rows_of_zeros() -> None:
    weight, bias = torch.randn(7, 16), torch.randn(7)
    weight[3] = 0
    linear = Int4Linear(weight, bias)
    assert torch.equal(linear(torch.zeros(2, 16)), bias.expand(2, 7))
    assert torch.equal(linear(torch.randn(2, 16))[:, 3], bias[3].expand(2))
