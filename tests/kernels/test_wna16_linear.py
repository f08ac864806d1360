"""int8 and int4 in Triton's interpreter, compared with the dequantized weights, with NaN around."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex.kernels import wna16_linear as coded_linear
from loraplex.kernels.linear_packing import Bits
from loraplex.kernels.wna16_linear import MAX_WNA16_ROWS, WNA16Linear
from support.quantized import rounded_weight

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"  # Triton 3.6's interpreter
)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
BITS = pytest.mark.parametrize("bits", [8, 4])


@pytest.fixture(autouse=True)
def on_cpu(interpreted_codes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let WNA16Linear run the interpreted kernels."""
    for name in ("multiply_quantized", "dequantize_weights"):
        monkeypatch.setattr(coded_linear, name, getattr(interpreted_codes, name))


def expected_product(x: Tensor, weight: Tensor, bias: Tensor | None, bits: Bits) -> Tensor:
    bias = None if bias is None else bias.double()
    return F.linear(x.double(), rounded_weight(weight, bits).double(), bias)


def assert_right(
    result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, bits: Bits
) -> None:
    expected = expected_product(x, weight, bias, bits)
    assert result.dtype == x.dtype
    assert (result.double() - expected).abs().max() <= TOLERANCE[x.dtype] * expected.abs().max()


@BITS
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(1, 1), (63, 133), (128, 32), (300, 70)], ids=str
)
@pytest.mark.parametrize("num_rows", [1, 16, 17, 40])
def test_equals_the_product_with_the_rounded_weight(
    num_rows: int, in_features: int, out_features: int, has_bias: bool, bits: Bits
) -> None:
    weight = torch.randn(out_features, in_features)
    bias = torch.randn(out_features) if has_bias else None
    x = torch.randn(num_rows, in_features)
    assert_right(WNA16Linear(weight, bias, bits=bits)(x), x, weight, bias, bits)


@BITS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [3, 20, 70])
def test_half_types_multiply_the_same_codes(num_rows: int, dtype: torch.dtype, bits: Bits) -> None:
    weight, bias = torch.randn(40, 300).to(dtype), torch.randn(40).to(dtype)
    x = torch.randn(num_rows, 300).to(dtype)
    assert_right(WNA16Linear(weight, bias, bits=bits)(x), x, weight, bias, bits)


@BITS
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("in_features", [2048, 2304, 2100])
def test_programs_that_share_a_row_add_up_to_it(
    in_features: int, has_bias: bool, bits: Bits, interpreted_codes: ModuleType
) -> None:
    weight, x = torch.randn(20, in_features), torch.randn(3, in_features)
    bias = torch.randn(20) if has_bias else None
    launch = interpreted_codes.choose_launch(3, 20, -(-in_features // 128), x.dtype)
    assert launch.splits == 2
    assert_right(WNA16Linear(weight, bias, bits=bits)(x), x, weight, bias, bits)


@BITS
def test_many_rows_meet_the_weight_written_out(bits: Bits) -> None:
    for num_rows in (MAX_WNA16_ROWS[torch.float32], MAX_WNA16_ROWS[torch.float32] + 1):
        weight, bias, x = torch.randn(70, 300), torch.randn(70), torch.randn(num_rows, 300)
        assert_right(WNA16Linear(weight, bias, bits=bits)(x), x, weight, bias, bits)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy computes the interpreted overflow
@BITS
@pytest.mark.parametrize("poison", [torch.inf, torch.nan, 3e38])
@pytest.mark.parametrize("num_rows", [2, 18, 40])
def test_keeps_one_rows_outlier_in_its_row(num_rows: int, poison: float, bits: Bits) -> None:
    linear = WNA16Linear(torch.randn(33, 200), bits=bits)
    x = torch.randn(num_rows, 200)
    clean = linear(x)
    x[-1, 7] = poison
    result = linear(x)
    assert torch.equal(result[:-1], clean[:-1])
    if poison != 3e38:
        assert not result[-1].isfinite().any()


@BITS
def test_takes_a_slice_of_wider_rows_and_leading_dimensions(bits: Bits) -> None:
    weight = torch.randn(20, 60)
    linear, x = WNA16Linear(weight, bits=bits), torch.randn(2, 3, 100)[..., 10:70]
    assert_right(linear(x).view(6, 20), x.reshape(6, 60), weight, None, bits)
    rows = torch.randn(4, 100)[:, 10:70]
    assert_right(linear(rows), rows, weight, None, bits)
    assert linear(x[:0]).shape == (0, 3, 20)


@BITS
def test_products_and_row_lengths_are_those_of_the_rounded_weight(bits: Bits) -> None:
    weight, bias, x = torch.randn(70, 300), torch.randn(70), torch.randn(5, 300)
    linear = WNA16Linear(weight.bfloat16(), bias.bfloat16(), bits=bits)
    assert_right(linear.products(x), x, weight.bfloat16(), None, bits)
    lengths = rounded_weight(weight.bfloat16(), bits).norm(dim=1)
    torch.testing.assert_close(linear.row_norms, lengths, rtol=1e-5, atol=1e-5)


def test_holds_a_byte_or_half_of_one_per_weight_and_its_scales() -> None:
    weight = torch.randn(20, 256)
    assert WNA16Linear(weight, bits=8).weight_bytes == 20 * 256 + 20 * 4
    assert WNA16Linear(weight, bits=4).weight_bytes == 20 * 256 // 2 + 20 * 2 * 2


def test_the_way_to_divide_a_product_depends_on_shapes_alone_and_leaves_no_group_out(
    interpreted_codes: ModuleType,
) -> None:
    for num_rows in (1, 16, 17, 32, 33, 512):
        for out_features, num_groups in ((64, 1), (4096, 7), (4096, 112), (28672, 32)):
            for dtype in TOLERANCE:
                launch = interpreted_codes.choose_launch(num_rows, out_features, num_groups, dtype)
                assert 1 <= launch.splits <= max(1, num_groups // 8)
                assert launch.splits <= interpreted_codes.MAX_SPLITS
