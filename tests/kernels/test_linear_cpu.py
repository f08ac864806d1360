"""The CPU's linear layers against products in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex.kernels.linear_cpu import PanelLinear
from support.cpu_kernels import needs_cpu_library

pytestmark = needs_cpu_library
DTYPES = pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
SIZES = [(1, 1), (63, 133), (300, 16), (256, 15), (513, 48)]
"""Numbers of inputs and outputs: less and more than a panel, and than what is multiplied at a
time."""


@DTYPES
@pytest.mark.parametrize("num_rows", [0, 1, 5, 17, 96, 100])
@pytest.mark.parametrize(("in_features", "out_features"), SIZES, ids=str)
def test_equals_products_in_fp64(
    in_features: int, out_features: int, num_rows: int, stored: torch.dtype
) -> None:
    weight, bias = random_weight(out_features, in_features, stored), torch.randn(out_features)
    x = torch.randn(num_rows, in_features)
    linear = PanelLinear(weight, bias)
    expected = F.linear(x.double(), weight.double())
    assert_close(linear.products(x), expected)
    assert_close(linear(x), expected + bias)


@DTYPES
def test_a_rows_bits_depend_on_no_other_row_and_no_number_of_threads(stored: torch.dtype) -> None:
    linear = PanelLinear(random_weight(72, 700, stored), torch.randn(72))
    x = torch.randn(130, 700)
    alone = torch.cat([linear(row) for row in x.split(1)])
    for num_rows in (2, 3, 4, 5, 6, 7, 11, 16, 17, 40, 96, 97, 130):
        assert torch.equal(linear(x[:num_rows]), alone[:num_rows])
    torch.set_num_threads(2)
    assert torch.equal(linear(x), alone)


@DTYPES
def test_a_row_that_is_not_finite_changes_no_other(stored: torch.dtype) -> None:
    linear = PanelLinear(random_weight(40, 64, stored))
    x = torch.randn(20, 64)
    expected = linear(x)
    x[7, 3], x[8] = float("nan"), float("inf")
    others = [row for row in range(20) if row not in (7, 8)]
    assert torch.equal(linear(x)[others], expected[others])
    assert linear(x)[7].isnan().all()


def test_a_weight_is_stored_in_bf16_only_if_that_holds_every_value() -> None:
    weight = torch.randn(133, 64).bfloat16().float()
    assert PanelLinear(weight).weight_bytes == 2 * 144 * 64
    weight[132, 63] += 2.0**-20
    linear = PanelLinear(weight)
    assert linear.weight_bytes == 4 * 144 * 64
    assert linear(torch.eye(64)).T.equal(weight)


def test_inputs_may_have_other_dimensions_strides_and_types() -> None:
    weight, x = random_weight(24, 32, torch.bfloat16), torch.randn(2, 3, 64)[..., ::2]
    linear = PanelLinear(weight.bfloat16())
    assert_close(linear(x), F.linear(x.double(), weight.double()))
    half = linear(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, linear(x.bfloat16().float()).bfloat16())


def random_weight(out_features: int, in_features: int, stored: torch.dtype) -> Tensor:
    """fp32, of values that this type holds."""
    return torch.randn(out_features, in_features).to(stored).float()


def assert_close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result.double(), expected.double(), rtol=1e-5, atol=1e-4)
