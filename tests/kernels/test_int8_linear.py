"""int8 on the CPU: exact sums, on every processor and for every row."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loraplex.kernels import cpu_library, int8_linear
from loraplex.kernels.int8_linear import (
    Int8Arithmetic,
    Int8Linear,
    OneDnnInt8Linear,
    int8_linear_reference,
    largest_of_rows,
    quantize_rows,
    seconds_of_exact_ways,
)
from loraplex.kernels.int8_linear_cpu import Int8PanelLinear
from loraplex.kernels.quantize import WeightFormat, quantize
from loraplex.kernels.quantized_part import part_of
from loraplex.kernels.quantized_weight import QuantizedWeight

SIZES = pytest.mark.parametrize(
    ("in_features", "out_features"), [(1, 1), (63, 133), (133, 63), (64, 128)], ids=str
)


EXACT_HERE = {Int8Arithmetic.PLAIN, *seconds_of_exact_ways()}
WAYS = sorted(EXACT_HERE, key=str)
HAS_PANELS = cpu_library.function("int8_linear", torch.float32) is not None
needs_panels = pytest.mark.skipif(not HAS_PANELS, reason="needs AVX512_VNNI and a C++ compiler")

Form = Callable[[QuantizedWeight, Tensor | None], Int8Linear]


@pytest.fixture(
    params=[*WAYS, pytest.param(None, marks=needs_panels)],
    ids=lambda way: way.name if way else "library",
)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Form:
    """Each way to multiply int8 that is right on this processor."""
    way: Int8Arithmetic | None = request.param
    if way is None:
        return Int8PanelLinear
    monkeypatch.setattr(int8_linear, "int8_arithmetic", lambda: way)
    return OneDnnInt8Linear


@SIZES
@pytest.mark.parametrize("num_rows", [1, 4, 63])
@pytest.mark.parametrize("has_bias", [False, True])
def test_int8_equals_the_reference(
    form: Form, in_features: int, out_features: int, num_rows: int, has_bias: bool
) -> None:
    weight = torch.randn(out_features, in_features)
    bias = torch.randn(out_features) if has_bias else None
    x = torch.randn(num_rows, in_features)
    expected = int8_linear_reference(x, weight, bias)
    torch.testing.assert_close(packed_int8(form, weight, bias)(x), expected, rtol=1e-5, atol=1e-5)


def test_int8_is_exact_where_pairs_of_products_are_largest(form: Form) -> None:
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0]).repeat(32)
    weight = torch.stack([torch.ones(128), signs, -torch.ones(128)])
    x = torch.stack([torch.ones(128), -torch.ones(128), signs])
    torch.testing.assert_close(packed_int8(form, weight)(x), x @ weight.T, rtol=1e-6, atol=1e-5)


def test_int8_is_exact_where_sums_do_not_fit_in_fp32(form: Form) -> None:
    weight, x = torch.ones(3, 11_008), torch.ones(2, 11_008)
    weight[1, ::2] = -1
    torch.testing.assert_close(packed_int8(form, weight)(x), x @ weight.T, rtol=1e-6, atol=1e-3)


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
from loraplex.kernels.int8_linear import OneDnnInt8Linear, _least_seconds, int8_linear_reference
from loraplex.kernels.quantize import WeightFormat, quantize
from loraplex.kernels.quantized_part import part_of

torch.set_num_threads(1)
weight, x = torch.randn(512, 512), torch.randn(8, 512)
packed = OneDnnInt8Linear(quantize(weight, WeightFormat.INT8))
torch.testing.assert_close(packed(x), int8_linear_reference(x, weight), rtol=1e-5, atol=1e-4)
print(_least_seconds(lambda: packed(x)) / _least_seconds(lambda: x @ weight.T))
"""


def test_int8_is_close_to_the_unquantized_product(form: Form) -> None:
    weight, x = torch.randn(256, 512), torch.randn(16, 512)
    exact = x @ weight.T
    assert (packed_int8(form, weight)(x) - exact).norm() / exact.norm() < 0.02


def test_int8_keeps_dtype_and_leading_dimensions(form: Form) -> None:
    weight, bias = torch.randn(20, 30), torch.randn(20)
    x = torch.randn(2, 3, 30)
    packed = packed_int8(form, weight.bfloat16(), bias.bfloat16())
    half, full = packed(x.bfloat16()), packed(x)
    assert half.dtype == torch.bfloat16
    assert full.dtype == torch.float32
    assert half.shape == full.shape == (2, 3, 20)
    torch.testing.assert_close(half.float(), full, rtol=5e-2, atol=1e-1)


def test_int8_holds_a_byte_per_weight_and_a_scale_per_output() -> None:
    weight = torch.randn(20, 299)
    assert packed_int8(OneDnnInt8Linear, weight).weight_bytes == 20 * 299 + 20 * (4 + 8)
    assert packed_int8(Int8PanelLinear, weight).weight_bytes == 32 * 300 + 32 * 4


def test_int8_gives_the_bias_for_rows_of_zeros(form: Form) -> None:
    weight, bias = torch.randn(7, 16), torch.randn(7)
    weight[3] = 0
    result = packed_int8(form, weight, bias)(torch.zeros(2, 16))
    assert torch.equal(result, bias.expand(2, 7))
    result = packed_int8(form, weight, bias)(torch.randn(2, 16))
    assert torch.equal(result[:, 3], bias[3].expand(2))


@pytest.mark.parametrize("poison", [torch.inf, -torch.inf, torch.nan, 3e38])
def test_int8_keeps_one_rows_outlier_in_its_row(form: Form, poison: float) -> None:
    packed = packed_int8(form, torch.randn(33, 64))
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


def packed_int8(form: Form, weight: Tensor, bias: Tensor | None = None) -> Int8Linear:
    return form(quantize(weight, WeightFormat.INT8), bias)


def test_parts_of_a_row_with_its_scale_sum_to_the_whole(form: Form) -> None:
    weight, x = torch.randn(24, 96), torch.randn(5, 96)
    x[:, 70] = 50.0  # an outlier in one of the parts
    whole = quantize(weight, WeightFormat.INT8)
    largest = largest_of_rows(x)
    total = torch.zeros(5, 24)
    for inputs in (range(32), range(32, 96)):
        part = part_of(whole, range(24), inputs)
        assert part is not None
        total += form(part, None)(x[:, inputs.start : inputs.stop], largest)
    torch.testing.assert_close(total, int8_linear_reference(x, weight), rtol=1e-5, atol=1e-5)


@needs_panels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@SIZES
def test_the_library_gives_the_bits_of_pytorchs_product_alone_and_in_any_batch(
    in_features: int, out_features: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8_linear, "int8_arithmetic", lambda: Int8Arithmetic.PLAIN)
    weight = quantize(torch.randn(out_features, in_features), WeightFormat.INT8)
    bias = torch.randn(out_features)
    library, plain = Int8PanelLinear(weight, bias), OneDnnInt8Linear(weight, bias)
    x = torch.randn(97, in_features).to(dtype)
    whole = library(x)
    assert torch.equal(whole, plain(x))
    assert torch.equal(library.products(x.float()), plain.products(x.float()))
    for rows in (slice(96, 97), slice(3, 20), slice(40, 97)):
        assert torch.equal(library(x[rows]), whole[rows])
