"""Quantized weights on the CPU, against the dequantized weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex.kernels.linear_packing import LinearKind, choose_linear
from loraplex.kernels.quantized_linear_cpu import QuantizedPanelLinear, serves_quantized
from loraplex.kernels.quantized_weight import CodeType, QuantizedWeight
from support.cpu_kernels import needs_cpu_library
from support.quantized_weights import (
    CASES,
    Case,
    inputs_of_15_bits,
    make_weight,
    plain_values,
)

pytestmark = needs_cpu_library
ALL_CASES = (
    *CASES,
    # Pieces that end within a vector, and groups that the GPU's kernel does not take.
    Case(CodeType.INT8, 77, torch.float32, torch.int8, shape=(33, 77)),
    Case(CodeType.INT8, 20, shape=(16, 130)),
    Case(CodeType.INT8, 20, shape=(16, 60)),
    Case(CodeType.INT4, 12, torch.float16, torch.float32, shape=(19, 50)),
    Case(CodeType.INT4, 128, shape=(3, 3)),
)
EACH_CASE = pytest.mark.parametrize("case", ALL_CASES, ids=str)


@EACH_CASE
@pytest.mark.parametrize("num_rows", [0, 100])
def test_equals_products_in_fp64(case: Case, num_rows: int) -> None:
    weight = make_weight(case)
    bias = torch.randn(weight.shape[0])
    assert serves_quantized(weight)
    linear = QuantizedPanelLinear(weight, bias)
    x = torch.randn(num_rows, weight.shape[1])
    expected = F.linear(x.double(), plain_values(weight).double())
    assert_close(linear.products(x), expected)
    assert_rounded(linear(x), expected + bias, weight, x)


@EACH_CASE
@pytest.mark.parametrize("num_rows", [1, 5])
def test_inputs_of_15_bits_are_not_rounded(case: Case, num_rows: int) -> None:
    weight = make_weight(case)
    x = inputs_of_15_bits(num_rows, weight.shape[1])
    expected = F.linear(x.double(), plain_values(weight).double())
    assert_close(QuantizedPanelLinear(weight)(x), expected)


@pytest.mark.parametrize("size", [2.0**-20, 1e4])
def test_an_input_is_rounded_as_the_largest_of_its_group_requires(size: float) -> None:
    for case in ALL_CASES:
        weight = make_weight(case)
        x = torch.randn(3, weight.shape[1])
        weight.codes[:, : weight.group] = 0
        if weight.zero is not None:
            weight.zero[:, 0] = 0
        elif weight.table is not None:
            object.__setattr__(weight, "table", weight.table.clone())
            weight.table[0] = 0
        order = torch.arange(weight.shape[1]) if weight.order is None else weight.order
        x[:, order[: weight.group]] *= size
        expected = F.linear(x.double(), plain_values(weight).double())
        assert_rounded(QuantizedPanelLinear(weight)(x), expected, weight, x)


@pytest.mark.parametrize("code", [-128, 127])
@pytest.mark.parametrize("size", [2.0, 1.0, -1.0, -2.0])
@pytest.mark.parametrize("num_rows", [1, 9])
def test_the_largest_sums_fit(code: int, size: float, num_rows: int) -> None:
    weight = make_weight(Case(CodeType.INT8, 512, shape=(16, 512)))
    weight.codes.fill_(code)
    weight.scale.fill_(1)
    x = torch.full((num_rows, 512), size).nextafter(torch.zeros(()))
    result = QuantizedPanelLinear(weight)(x)
    torch.testing.assert_close(
        result, torch.full_like(result, 512 * code * size), rtol=2**-15, atol=0
    )


@EACH_CASE
def test_a_power_of_two_scales_inputs_without_rounding(case: Case) -> None:
    linear, x = QuantizedPanelLinear(make_weight(case)), torch.randn(5, case.shape[1])
    expected = linear(x)
    for power in (2.0**-70, 2.0**70):
        assert torch.equal(linear(x * power), expected * power)


@EACH_CASE
def test_inputs_that_are_hardly_numbers_give_results_near_zero(case: Case) -> None:
    linear, x = QuantizedPanelLinear(make_weight(case)), torch.randn(5, case.shape[1])
    for size in (1e-36, 1e-40, 1e-45):
        assert (linear(x * size).abs() <= size * 1e4).all()
        assert linear.products(x * size).isfinite().all()


@EACH_CASE
def test_a_rows_bits_depend_on_no_other_row_and_no_number_of_threads(case: Case) -> None:
    linear = QuantizedPanelLinear(make_weight(case), torch.randn(case.shape[0]))
    x = torch.randn(130, case.shape[1])
    alone = torch.cat([linear(row) for row in x.split(1)])
    for num_rows in (2, 3, 4, 5, 6, 7, 9, 13, 16, 17, 96, 97, 130):
        assert torch.equal(linear(x[:num_rows]), alone[:num_rows])
    torch.set_num_threads(2)
    assert torch.equal(linear(x), alone)


@EACH_CASE
@pytest.mark.parametrize("poison", [torch.inf, torch.nan, 3e38])
@pytest.mark.parametrize("num_rows", [2, 40])
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
    assert_rounded(linear(x), F.linear(x.double(), plain_values(weight).double()), weight, x)
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
    weight = make_weight(Case(CodeType.FP8, 256, shape=(1, 256)))
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
        case = Case(CodeType.INT8, 2, shape=(len(scale), 2))
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


def test_groups_that_would_share_a_word_are_dequantized() -> None:
    for case in (Case(CodeType.INT4, 6), Case(CodeType.INT8, 5)):
        kind = choose_linear(make_weight(case), dtype=torch.float32, device_type="cpu")
        assert kind is LinearKind.DEQUANTIZED


def assert_close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result.double(), expected.double(), rtol=1e-5, atol=1e-4)


def assert_rounded(result: Tensor, expected: Tensor, weight: QuantizedWeight, x: Tensor) -> None:
    """Whether inputs are at most rounded to 16 bits, by the largest of each 128 of a group.

    The last bit of an input is at most 2^-14 of the largest, so its error has a standard deviation
    of at most 2^-14 / sqrt(12) of that. The errors of a sum are independent; six standard
    deviations are exceeded once in 10^9. Sums are fp32, as in `assert_close`.
    """
    values = plain_values(weight).double()
    order = torch.arange(weight.shape[1]) if weight.order is None else weight.order
    variance = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=torch.float64)
    for start in range(0, weight.shape[1], weight.group):
        for columns in order[start : start + weight.group].split(128):
            largest = x[..., columns].double().abs().amax(dim=-1, keepdim=True)
            variance += (largest * 2**-14).square() / 12 * values[:, columns].square().sum(dim=1)
    bound = 6 * variance.sqrt() + 1e-5 * expected.abs() + 1e-4
    assert ((result - expected).abs() <= bound).all()
