"""Quantized weights on the CPU, against the dequantized weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex.kernels.quantized_linear_cpu import QuantizedPanelLinear, serves_quantized
from support.cpu_kernels import needs_cpu_library
from support.quantized_weights import CASES, Case, make_weight, plain_values

pytestmark = needs_cpu_library
EACH_CASE = pytest.mark.parametrize("case", CASES, ids=str)


@EACH_CASE
@pytest.mark.parametrize("num_rows", [0, 1, 7, 100])
def test_equals_products_in_fp64(case: Case, num_rows: int) -> None:
    weight = make_weight(case)
    bias = torch.randn(weight.shape[0])
    assert serves_quantized(weight)
    linear = QuantizedPanelLinear(weight, bias)
    x = torch.randn(num_rows, weight.shape[1])
    expected = F.linear(x.double(), plain_values(weight).double())
    assert_close(linear.products(x), expected)
    assert_close(linear(x), expected + bias)


@EACH_CASE
def test_a_rows_bits_depend_on_no_other_row_and_no_number_of_threads(case: Case) -> None:
    linear = QuantizedPanelLinear(make_weight(case), torch.randn(case.shape[0]))
    x = torch.randn(130, case.shape[1])
    alone = torch.cat([linear(row) for row in x.split(1)])
    for num_rows in (2, 3, 6, 7, 9, 16, 17, 96, 97, 130):
        assert torch.equal(linear(x[:num_rows]), alone[:num_rows])
    torch.set_num_threads(2)
    assert torch.equal(linear(x), alone)


@EACH_CASE
@pytest.mark.parametrize("poison", [torch.inf, torch.nan, 3e38])
@pytest.mark.parametrize("num_rows", [2, 5, 40])
def test_keeps_one_rows_outlier_in_its_row(case: Case, poison: float, num_rows: int) -> None:
    linear, x = QuantizedPanelLinear(make_weight(case)), torch.randn(num_rows, case.shape[1])
    clean = linear(x)
    x[-1, 7 % case.shape[1]] = poison
    result = linear(x)
    assert torch.equal(result[:-1], clean[:-1])
    if poison != 3e38:
        assert not result[-1].isfinite().any()


@EACH_CASE
def test_gives_the_bias_for_rows_of_zeros(case: Case) -> None:
    bias = torch.randn(case.shape[0])
    linear = QuantizedPanelLinear(make_weight(case), bias)
    assert torch.equal(linear(torch.zeros(2, case.shape[1])), bias.expand(2, -1))


@EACH_CASE
def test_inputs_may_have_other_dimensions_strides_and_types(case: Case) -> None:
    weight = make_weight(case)
    linear, x = QuantizedPanelLinear(weight), torch.randn(2, 3, 2 * case.shape[1])[..., ::2]
    assert_close(linear(x), F.linear(x.double(), plain_values(weight).double()))
    assert torch.equal(linear(x)[1], linear(x[1]))
    half = linear(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, linear(x.bfloat16().float()).bfloat16())


@EACH_CASE
def test_row_norms_are_those_of_the_values(case: Case) -> None:
    weight = make_weight(case)
    norms = plain_values(weight).double().norm(dim=1)
    assert torch.allclose(QuantizedPanelLinear(weight).row_norms.double(), norms, rtol=1e-6)


def test_every_code_of_fp8_has_its_value() -> None:
    weight = make_weight(Case(CASES[-1].code_type, 256, shape=(1, 256)))
    codes = torch.arange(-128, 128)
    codes[(codes == -1) | (codes == 127)] = 0
    weight.codes[0] = codes
    weight.scale.fill_(1)
    assert torch.equal(QuantizedPanelLinear(weight)(torch.eye(256)).T, weight.dequantize())


def test_every_scale_of_16_bits_has_its_value() -> None:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        scale = numbers.view(dtype)
        scale = scale[scale.isfinite()][:, None]
        case = Case(CASES[0].code_type, 2, shape=(len(scale), 2))
        weight = make_weight(case)
        weight.codes.fill_(1)
        object.__setattr__(weight, "scale", scale)
        assert torch.equal(QuantizedPanelLinear(weight)(torch.eye(2)).T, weight.dequantize())


def test_two_codes_of_four_bits_share_a_byte() -> None:
    case = next(case for case in CASES if case.scale_dtype is torch.bfloat16)
    linear = QuantizedPanelLinear(make_weight(case))
    out_features, in_features = case.shape
    assert linear.weight_bytes == out_features * in_features * (0.5 + 2 / case.group)


@EACH_CASE
def test_the_rows_read_from_panels_are_those_of_the_weight(case: Case) -> None:
    weight = make_weight(case)
    indices = torch.arange(len(weight.codes)).flip(0).repeat(2)
    linear = QuantizedPanelLinear(weight)
    assert torch.equal(linear.weight_rows(indices), plain_values(weight)[indices])


def assert_close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result.double(), expected.double(), rtol=1e-5, atol=1e-4)
