"""int8 on the CPU: exact sums, on every processor and for every row."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from loraplex.kernels import int8_linear
from loraplex.kernels.int8_linear import (
    Int8Arithmetic,
    Int8Linear,
    int8_linear_reference,
    largest_of_rows,
    quantize_rows,
    seconds_of_exact_ways,
)
from loraplex.kernels.quantize import WeightFormat, quantize
from loraplex.kernels.quantized_part import part_of

SIZES = pytest.mark.parametrize(
    ("in_features", "out_features"), [(1, 1), (63, 133), (133, 63), (64, 128)], ids=str
)


EXACT_HERE = {Int8Arithmetic.PLAIN, *seconds_of_exact_ways()}


@pytest.fixture(params=sorted(EXACT_HERE, key=str), ids=lambda way: way.name)
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Int8Arithmetic:
    """Each way to multiply int8 that is right on this processor."""
    way: Int8Arithmetic = request.param
    monkeypatch.setattr(int8_linear, "int8_arithmetic", lambda: way)
    return way


@SIZES
@pytest.mark.parametrize("num_rows", [1, 4, 63])
@pytest.mark.parametrize("has_bias", [False, True])
def test_int8_equals_the_reference(
    arithmetic: Int8Arithmetic, in_features: int, out_features: int, num_rows: int, has_bias: bool
) -> None:
    weight = torch.randn(out_features, in_features)
    bias = torch.randn(out_features) if has_bias else None
    x = torch.randn(num_rows, in_features)
    expected = int8_linear_reference(x, weight, bias)
    torch.testing.assert_close(packed_int8(weight, bias)(x), expected, rtol=1e-5, atol=1e-5)


def test_int8_is_exact_where_pairs_of_products_are_largest(arithmetic: Int8Arithmetic) -> None:
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0]).repeat(32)
    weight = torch.stack([torch.ones(128), signs, -torch.ones(128)])
    x = torch.stack([torch.ones(128), -torch.ones(128), signs])
    torch.testing.assert_close(packed_int8(weight)(x), x @ weight.T, rtol=1e-6, atol=1e-5)


def test_int8_is_exact_where_sums_do_not_fit_in_fp32(arithmetic: Int8Arithmetic) -> None:
    weight, x = torch.ones(3, 11_008), torch.ones(2, 11_008)
    weight[1, ::2] = -1
    torch.testing.assert_close(packed_int8(weight)(x), x @ weight.T, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize(
    "instructions",
    [
        "ALL",
        pytest.param("AVX2", marks=pytest.mark.slow),
        pytest.param("AVX2_VNNI", marks=pytest.mark.slow),
        pytest.param("AVX512_CORE", marks=pytest.mark.slow),
    ],
)
def test_int8_is_exact_and_runs_in_no_loop_of_plain_code(instructions: str) -> None:
    """Whichever instructions oneDNN may use; that loop is 400 times as slow as the fp32 matmul."""
    result = subprocess.run(
        [sys.executable, "-c", _SLOWDOWN_OF_INT8],
        env=os.environ
        | {"ONEDNN_MAX_CPU_ISA": instructions, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert float(result.stdout) < 20


_SLOWDOWN_OF_INT8 = """
import torch
from loraplex.kernels.int8_linear import Int8Linear, _least_seconds, int8_linear_reference
from loraplex.kernels.quantize import WeightFormat, quantize
from loraplex.kernels.quantized_part import part_of

torch.set_num_threads(1)
weight, x = torch.randn(512, 512), torch.randn(8, 512)
packed = Int8Linear(quantize(weight, WeightFormat.INT8))
torch.testing.assert_close(packed(x), int8_linear_reference(x, weight), rtol=1e-5, atol=1e-4)
print(_least_seconds(lambda: packed(x)) / _least_seconds(lambda: x @ weight.T))
"""


def test_int8_is_close_to_the_unquantized_product() -> None:
    weight, x = torch.randn(256, 512), torch.randn(16, 512)
    exact = x @ weight.T
    assert (packed_int8(weight)(x) - exact).norm() / exact.norm() < 0.02


def test_int8_keeps_dtype_and_leading_dimensions() -> None:
    weight, bias = torch.randn(20, 30), torch.randn(20)
    x = torch.randn(2, 3, 30)
    packed = packed_int8(weight.bfloat16(), bias.bfloat16())
    half, full = packed(x.bfloat16()), packed(x)
    assert half.dtype == torch.bfloat16
    assert full.dtype == torch.float32
    assert half.shape == full.shape == (2, 3, 20)
    torch.testing.assert_close(half.float(), full, rtol=5e-2, atol=1e-1)


def test_int8_holds_a_byte_per_weight_and_a_scale_per_output() -> None:
    assert packed_int8(torch.randn(20, 300)).weight_bytes == 20 * 300 + 20 * (4 + 8)


def test_int8_gives_the_bias_for_rows_of_zeros(arithmetic: Int8Arithmetic) -> None:
    weight, bias = torch.randn(7, 16), torch.randn(7)
    weight[3] = 0
    result = packed_int8(weight, bias)(torch.zeros(2, 16))
    assert torch.equal(result, bias.expand(2, 7))
    result = packed_int8(weight, bias)(torch.randn(2, 16))
    assert torch.equal(result[:, 3], bias[3].expand(2))


@pytest.mark.parametrize("poison", [torch.inf, -torch.inf, torch.nan, 3e38])
def test_int8_keeps_one_rows_outlier_in_its_row(arithmetic: Int8Arithmetic, poison: float) -> None:
    packed = packed_int8(torch.randn(33, 64))
    x = torch.randn(5, 64)
    clean = packed(x)
    x[2, 7] = poison
    result = packed(x)
    others = [0, 1, 3, 4]
    assert torch.equal(result[others], clean[others])
    if poison != 3e38:
        assert not result[2].isfinite().any()


def test_quantized_rows_are_within_half_a_step_of_the_values() -> None:
    rows = torch.randn(9, 133) * torch.logspace(-6, 6, 9)[:, None]
    quantized, scale = quantize_rows(rows)
    assert quantized.dtype == torch.int8
    assert scale.shape == (9, 1)
    assert (quantized.float() * scale - rows).abs().le(scale * 0.5001).all()
    assert quantized.abs().amax(dim=1).eq(127).all()


def packed_int8(weight: Tensor, bias: Tensor | None = None) -> Int8Linear:
    return Int8Linear(quantize(weight, WeightFormat.INT8), bias)


def test_parts_of_a_row_with_its_scale_sum_to_the_whole(arithmetic: Int8Arithmetic) -> None:
    weight, x = torch.randn(24, 96), torch.randn(5, 96)
    x[:, 70] = 50.0  # an outlier in one of the parts
    whole = quantize(weight, WeightFormat.INT8)
    largest = largest_of_rows(x)
    total = torch.zeros(5, 24)
    for inputs in (range(32), range(32, 96)):
        part = part_of(whole, range(24), inputs)
        assert part is not None
        total += Int8Linear(part)(x[:, inputs.start : inputs.stop], largest)
    torch.testing.assert_close(total, int8_linear_reference(x, weight), rtol=1e-5, atol=1e-5)
