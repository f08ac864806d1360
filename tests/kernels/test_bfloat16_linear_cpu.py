"""The CPU's linear layers in bf16 against products in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex.kernels.bfloat16_linear_cpu import BFloat16PanelLinear
from support.cpu_kernels import multiplies_bfloat16

pytestmark = pytest.mark.skipif(
    not multiplies_bfloat16(), reason="the processor lacks AVX512_BF16, or there is no compiler"
)
SIZES = [(1, 1), (63, 133), (300, 16), (256, 15), (257, 33), (513, 48), (64, 96)]
"""Numbers of inputs and outputs: odd ones, less and more than a panel, and than what is multiplied
at a time."""


@pytest.mark.parametrize("num_rows", [0, 1, 5, 17, 96, 250])
@pytest.mark.parametrize(("in_features", "out_features"), SIZES, ids=str)
def test_equals_products_in_fp64(in_features: int, out_features: int, num_rows: int) -> None:
    weight, bias, x = random_case(out_features, in_features, num_rows)
    linear = BFloat16PanelLinear(weight, bias)
    expected = F.linear(x.double(), weight.double())
    torch.testing.assert_close(linear.products(x).double(), expected, rtol=1e-5, atol=1e-4)
    assert linear.products(x).dtype is torch.float32
    assert_rounded_once(linear(x), expected + bias.double())
    assert_rounded_once(BFloat16PanelLinear(weight)(x), expected)


def test_a_rows_bits_depend_on_no_other_row_and_no_number_of_threads() -> None:
    weight, bias, x = random_case(72, 700, 290)
    linear = BFloat16PanelLinear(weight, bias)
    alone = torch.cat([linear.products(row) for row in x.split(1)])
    rounded = torch.cat([linear(row) for row in x.split(1)])
    for num_rows in (*range(2, 40), 96, 97, 130, 240, 241, 290):
        assert torch.equal(linear.products(x[:num_rows]), alone[:num_rows])
        assert torch.equal(linear(x[:num_rows]), rounded[:num_rows])
    torch.set_num_threads(2)
    assert torch.equal(linear.products(x), alone)


def test_a_row_that_is_not_finite_changes_no_other() -> None:
    weight, _, x = random_case(40, 63, 20)
    linear = BFloat16PanelLinear(weight)
    expected = linear(x)
    x[7, 3], x[8] = float("nan"), float("inf")
    others = [row for row in range(20) if row not in (7, 8)]
    assert torch.equal(linear(x)[others], expected[others])
    assert linear(x)[7].isnan().all()


def test_every_weight_is_kept() -> None:
    weight, _, _ = random_case(133, 63, 0)
    linear = BFloat16PanelLinear(weight)
    assert linear.weight_bytes == 2 * 144 * 64
    assert torch.equal(linear(torch.eye(63).bfloat16()).T, weight)
    assert torch.equal(linear.row_norms, weight.float().square().sum(dim=1).sqrt())


def test_inputs_may_have_other_dimensions_and_strides() -> None:
    weight, bias, _ = random_case(24, 32, 0)
    linear, x = BFloat16PanelLinear(weight, bias), torch.randn(2, 3, 64).bfloat16()[..., ::2]
    assert torch.equal(linear(x).view(6, 24), linear(x.reshape(6, 32)))


def random_case(
    out_features: int, in_features: int, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, a bias and inputs, in bf16."""
    sizes = ((out_features, in_features), (out_features,), (num_rows, in_features))
    weight, bias, x = (torch.randn(size).bfloat16() for size in sizes)
    return weight, bias, x


def assert_rounded_once(result: Tensor, expected: Tensor) -> None:
    """`result`, bf16, is within half a unit of its last place, and what fp32 sums differ by."""
    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(result.double(), expected, rtol=2.0**-8, atol=1e-4)
