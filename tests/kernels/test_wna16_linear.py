"""Quantized weights in Triton's interpreter, compared with their values, with NaN around."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex.kernels import wna16_linear as coded_linear
from loraplex.kernels.linear import DenseLinear
from loraplex.kernels.linear_packing import choose_linear
from loraplex.kernels.linear_sizes import linear_bytes
from loraplex.kernels.quantize import WeightFormat, quantize
from loraplex.kernels.quantized_weight import CodeType, QuantizedWeight
from loraplex.kernels.wna16_linear import MAX_WNA16_ROWS, WNA16Linear, pack_wna16
from loraplex.kernels.wna16_weight import has_served_groups, pack_codes
from support.marks import marked_slow
from support.quantized import rounded_weight
from support.quantized_weights import CASES, Case, make_weight, plain_values

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"  # Triton 3.6's interpreter
)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EACH_FORMAT = pytest.mark.parametrize("weight_format", [WeightFormat.INT8, WeightFormat.INT4])
FORMS = pytest.mark.parametrize("case", CASES, ids=str)
MULTIPLIED = (*CASES[2:4], CASES[7], CASES[9], CASES[12], CASES[14])
"""Of each type of code, one with everything that it may have."""
WIDE = (20, 2100)
WIDE_CASES = (
    Case(CodeType.INT8, 192, shape=WIDE),
    Case(CodeType.INT8, 2100, torch.float16, torch.int8, shape=WIDE),
    Case(CodeType.INT4, 64, torch.bfloat16, torch.float32, True, shape=WIDE),
    Case(CodeType.INT4, 256, torch.float16, torch.int8, shape=WIDE),
    Case(CodeType.TABLE4, 96, shape=WIDE),
    Case(CodeType.FP8, 2100, shape=WIDE),
)
"""Several programs share a row. Groups are of all relations to a unit of columns."""
ZERO_CASES = pytest.mark.parametrize(
    "case", [case for case in CASES if case.zero_dtype is not None], ids=str
)


@pytest.fixture(autouse=True)
def on_cpu(interpreted_codes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let WNA16Linear run the interpreted kernels."""
    for name in ("multiply_quantized", "dequantize_weight"):
        monkeypatch.setattr(coded_linear, name, getattr(interpreted_codes, name))


def make_linear(weight: Tensor, bias: Tensor | None, weight_format: WeightFormat) -> WNA16Linear:
    return WNA16Linear(quantize(weight, weight_format), bias)


def assert_right(
    result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, weight_format: WeightFormat
) -> None:
    assert_product(result, x, rounded_weight(weight, weight_format), bias)


def assert_product(result: Tensor, x: Tensor, values: Tensor, bias: Tensor | None) -> None:
    bias = None if bias is None else bias.double()
    expected = F.linear(x.double(), values.double(), bias)
    assert result.dtype == x.dtype
    assert (result.double() - expected).abs().max() <= TOLERANCE[x.dtype] * expected.abs().max()


@EACH_FORMAT
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(1, 1), (63, 133), (128, 32), (300, 70)], ids=str
)
@pytest.mark.parametrize("num_rows", marked_slow([1, 16, 17, 40], slow={16, 40}))
def test_equals_the_product_with_the_rounded_weight(
    num_rows: int, in_features: int, out_features: int, has_bias: bool, weight_format: WeightFormat
) -> None:
    weight = torch.randn(out_features, in_features)
    bias = torch.randn(out_features) if has_bias else None
    x = torch.randn(num_rows, in_features)
    assert_right(make_linear(weight, bias, weight_format)(x), x, weight, bias, weight_format)


@EACH_FORMAT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", marked_slow([3, 20, 70], slow={3}))
def test_half_types_multiply_the_same_codes(
    num_rows: int, dtype: torch.dtype, weight_format: WeightFormat
) -> None:
    weight, bias = torch.randn(40, 300).to(dtype), torch.randn(40).to(dtype)
    x = torch.randn(num_rows, 300).to(dtype)
    assert_right(make_linear(weight, bias, weight_format)(x), x, weight, bias, weight_format)


@EACH_FORMAT
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("in_features", marked_slow([2048, 2304, 2100], slow={2048, 2304}))
def test_programs_that_share_a_row_add_up_to_it(
    in_features: int, has_bias: bool, weight_format: WeightFormat, interpreted_codes: ModuleType
) -> None:
    weight, x = torch.randn(20, in_features), torch.randn(3, in_features)
    bias = torch.randn(20) if has_bias else None
    launch = interpreted_codes.choose_launch(3, 20, in_features, x.dtype)
    assert launch.splits == 2
    assert_right(make_linear(weight, bias, weight_format)(x), x, weight, bias, weight_format)


@pytest.mark.parametrize("size", [16, 48, 0])
@pytest.mark.parametrize("weight_format", WeightFormat)
def test_groups_of_any_size_are_multiplied(weight_format: WeightFormat, size: int) -> None:
    weight = quantize(torch.randn(20, 200), weight_format, size)
    x = torch.randn(3, 200)
    assert_product(WNA16Linear(weight)(x), x, weight.dequantize(), None)


@EACH_FORMAT
def test_many_rows_meet_the_weight_written_out(weight_format: WeightFormat) -> None:
    for num_rows in (MAX_WNA16_ROWS[torch.float32], MAX_WNA16_ROWS[torch.float32] + 1):
        weight, bias, x = torch.randn(70, 300), torch.randn(70), torch.randn(num_rows, 300)
        assert_right(make_linear(weight, bias, weight_format)(x), x, weight, bias, weight_format)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy computes the interpreted overflow
@EACH_FORMAT
@pytest.mark.parametrize("poison", [torch.inf, torch.nan, 3e38])
@pytest.mark.parametrize("num_rows", marked_slow([2, 18, 40], slow={2, 40}))
def test_keeps_one_rows_outlier_in_its_row(
    num_rows: int, poison: float, weight_format: WeightFormat
) -> None:
    linear = make_linear(torch.randn(33, 200), None, weight_format)
    x = torch.randn(num_rows, 200)
    clean = linear(x)
    x[-1, 7] = poison
    result = linear(x)
    assert torch.equal(result[:-1], clean[:-1])
    if poison != 3e38:
        assert not result[-1].isfinite().any()


@EACH_FORMAT
def test_takes_a_slice_of_wider_rows_and_leading_dimensions(weight_format: WeightFormat) -> None:
    weight = torch.randn(20, 60)
    linear, x = make_linear(weight, None, weight_format), torch.randn(2, 3, 100)[..., 10:70]
    assert_right(linear(x).view(6, 20), x.reshape(6, 60), weight, None, weight_format)
    rows = torch.randn(4, 100)[:, 10:70]
    assert_right(linear(rows), rows, weight, None, weight_format)
    assert linear(x[:0]).shape == (0, 3, 20)


@EACH_FORMAT
def test_products_and_row_lengths_are_those_of_the_rounded_weight(
    weight_format: WeightFormat,
) -> None:
    weight, bias, x = torch.randn(70, 300), torch.randn(70), torch.randn(5, 300)
    linear = make_linear(weight.bfloat16(), bias.bfloat16(), weight_format)
    assert_right(linear.products(x), x, weight.bfloat16(), None, weight_format)
    lengths = rounded_weight(weight.bfloat16(), weight_format).norm(dim=1)
    torch.testing.assert_close(linear.row_norms, lengths, rtol=1e-5, atol=1e-5)


def test_holds_a_byte_or_half_of_one_per_weight_and_its_scales() -> None:
    weight = torch.randn(20, 256)
    assert make_linear(weight, None, WeightFormat.INT8).weight_bytes == 20 * 256 + 20 * 4
    assert make_linear(weight, None, WeightFormat.INT4).weight_bytes == 20 * 256 // 2 + 20 * 2 * 2


@pytest.mark.parametrize("case", marked_slow(CASES, slow=set(CASES) - set(MULTIPLIED)), ids=str)
def test_every_form_multiplies_its_values(case: Case) -> None:
    weight = make_weight(case)
    values, bias = plain_values(weight), torch.randn(case.shape[0])
    linear, x = WNA16Linear(weight, bias), torch.randn(5, case.shape[1])
    assert_product(linear(x), x, values, bias)
    assert_product(linear.products(x[:2].half()), x[:2].half().float(), values, None)
    torch.testing.assert_close(linear.row_norms, values.norm(dim=1), rtol=1e-5, atol=1e-5)


@FORMS
def test_every_form_is_written_out_to_the_bit(case: Case, interpreted_codes: ModuleType) -> None:
    weight = make_weight(case)
    expected = weight.dequantize()
    if weight.order is not None:
        expected = expected[:, weight.order]
    packed = pack_codes(weight)
    assert torch.equal(interpreted_codes.dequantize_weight(packed, torch.float32), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_weight_is_rounded_once_when_it_is_written_out(
    dtype: torch.dtype, interpreted_codes: ModuleType, nearest_bf16: None
) -> None:
    weight = make_weight(Case(CodeType.INT4, 32, torch.float32, torch.float32, shape=(9, 77)))
    written = interpreted_codes.dequantize_weight(pack_codes(weight), dtype)
    assert torch.equal(written, weight.dequantize(dtype))


@pytest.mark.parametrize("case", WIDE_CASES, ids=str)
def test_programs_share_a_row_of_every_form(case: Case, interpreted_codes: ModuleType) -> None:
    weight, bias = make_weight(case), torch.randn(case.shape[0])
    x = torch.randn(3, case.shape[1])
    assert interpreted_codes.choose_launch(3, *case.shape, x.dtype).splits == 2
    assert_product(WNA16Linear(weight, bias)(x), x, plain_values(weight), bias)


@ZERO_CASES
def test_zero_points_count_in_half_types(case: Case) -> None:
    weight, x = make_weight(case), torch.randn(3, case.shape[1]).bfloat16()
    assert_product(WNA16Linear(weight)(x), x, plain_values(weight), None)


@ZERO_CASES
def test_zero_points_count_in_many_rows(case: Case) -> None:
    weight = make_weight(case)
    x = torch.randn(MAX_WNA16_ROWS[torch.float32] + 1, case.shape[1])
    assert_product(WNA16Linear(weight)(x), x, plain_values(weight), None)


@ZERO_CASES
def test_keeps_one_rows_outlier_in_its_row_with_zero_points(case: Case) -> None:
    linear, x = WNA16Linear(make_weight(case)), torch.randn(3, case.shape[1])
    clean = linear(x)
    x[1, 7] = torch.nan
    result = linear(x)
    assert torch.equal(result[::2], clean[::2])
    assert result[1].isnan().all()
    assert linear(x[:0]).shape == (0, case.shape[0])


def test_every_fp8_number_is_exact(interpreted_codes: ModuleType) -> None:
    codes = torch.arange(-128, 128).to(torch.int8).view(1, 256)
    weight = QuantizedWeight(CodeType.FP8, codes, torch.ones(1, 1), 256)
    values, expected = (
        interpreted_codes.dequantize_weight(pack_codes(weight), torch.float32),
        weight.values(),
    )
    is_number = expected.isfinite()
    assert is_number.sum() == 254
    assert torch.equal(values[is_number], expected[is_number])


def test_groups_that_the_layout_lacks_are_served_dense() -> None:
    weight, x = make_weight(Case(CodeType.INT4, 24, shape=(5, 60))), torch.randn(3, 60)
    assert not has_served_groups(weight)
    linear = pack_wna16(weight, None, x.dtype)
    assert isinstance(linear, DenseLinear)
    assert_product(linear(x), x, plain_values(weight), None)
    assert isinstance(pack_wna16(make_weight(CASES[0]), None, x.dtype), WNA16Linear)


@FORMS
def test_the_rows_read_from_the_layout_are_those_of_the_weight(case: Case) -> None:
    weight = make_weight(case)
    indices = torch.arange(len(weight.codes)).flip(0).repeat(2)
    linear = WNA16Linear(weight)
    assert torch.equal(linear.weight_rows(indices), weight.dequantize()[indices])


@pytest.mark.parametrize("case", [*CASES, *WIDE_CASES], ids=str)
def test_the_bytes_of_a_layer_are_known_without_packing_it(case: Case) -> None:
    weight = make_weight(case)
    kind = choose_linear(weight, dtype=torch.bfloat16, device_type="cuda")
    linear = pack_wna16(weight, None, torch.bfloat16)
    assert type(linear).__name__ == kind
    expected = linear_bytes(weight, kind, dtype=torch.bfloat16, device_type="cuda")
    assert linear.weight_bytes == expected


def test_the_way_to_divide_a_product_depends_on_shapes_alone_and_leaves_no_column_out(
    interpreted_codes: ModuleType,
) -> None:
    for num_rows in (1, 16, 17, 32, 33, 512):
        for out_features, in_features in ((64, 1), (4096, 900), (4096, 14336), (28672, 4096)):
            for dtype in TOLERANCE:
                launch = interpreted_codes.choose_launch(num_rows, out_features, in_features, dtype)
                assert 1 <= launch.splits <= max(1, in_features // 1024)
                assert launch.splits <= interpreted_codes.MAX_SPLITS
