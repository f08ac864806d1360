"""The base's linear layers without quantization, and the chosen implementation."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from loraplex.kernels import linear_packing
from loraplex.kernels.bfloat16_linear_cpu import BFloat16PanelLinear, serves_bfloat16
from loraplex.kernels.int8_linear import Int8Linear, OneDnnInt8Linear
from loraplex.kernels.linear import DenseLinear, Linear, PackedLinear
from loraplex.kernels.linear_cpu import PanelLinear
from loraplex.kernels.linear_packing import choose_linear, pack_linear, prefers_bytes
from loraplex.kernels.linear_sizes import linear_bytes
from loraplex.kernels.quantize import WeightFormat, quantize
from loraplex.kernels.quantized_linear import DequantizedLinear
from loraplex.kernels.quantized_linear_cpu import QuantizedPanelLinear
from support.cpu_kernels import multiplies_bfloat16, needs_cpu_library, remove_cpu_library
from support.quantized import rounded_weight

SIZES = pytest.mark.parametrize(
    ("in_features", "out_features"), [(1, 1), (63, 133), (133, 63), (64, 128)], ids=str
)


@SIZES
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("form", [DenseLinear, PackedLinear])
def test_dense_forms_equal_torch(
    form: Callable[..., Linear], in_features: int, out_features: int, has_bias: bool
) -> None:
    weight = torch.randn(out_features, in_features)
    bias = torch.randn(out_features) if has_bias else None
    x = torch.randn(5, in_features)
    packed = form(weight, bias)
    torch.testing.assert_close(packed(x), F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    assert packed.weight_bytes == 4 * in_features * out_features
    assert (packed.in_features, packed.out_features) == (in_features, out_features)


def stored_bytes(buffer: torch.Tensor) -> bytes:
    if not buffer.is_mkldnn:
        return bytes(buffer.flatten().view(torch.uint8).numpy())
    onednn = torch.ops.mkldnn
    return ctypes.string_at(onednn.data_ptr(buffer), onednn._nbytes(buffer))


FORMS_AND_DTYPES = [
    *product([DenseLinear, PackedLinear, PanelLinear], [torch.float32, torch.bfloat16]),
    (BFloat16PanelLinear, torch.bfloat16),
]


@pytest.mark.parametrize(("form", "dtype"), FORMS_AND_DTYPES)
def test_an_erased_weight_leaves_no_byte(form: Callable[..., Linear], dtype: torch.dtype) -> None:
    is_supported = dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if form is PackedLinear and not is_supported:
        pytest.skip("oneDNN has no bfloat16 here")
    linear = form(torch.rand(133, 64, dtype=dtype), torch.rand(133, dtype=dtype))
    stored = [stored_bytes(each) for each in linear.buffers()]
    assert [any(each) for each in stored] == [True] * 3
    linear.erase()
    assert [any(stored_bytes(each)) for each in linear.buffers()] == [False] * 3


@needs_cpu_library
def test_packs_codes_for_the_library_and_keeps_other_values() -> None:
    weight, x = torch.randn(8, 16), torch.randn(3, 16)
    for weight_format in WeightFormat:
        packed = pack_linear(quantize(weight, weight_format))
        is_multiplied_as_bytes = weight_format is WeightFormat.INT8 and prefers_bytes()
        assert isinstance(packed, Int8Linear if is_multiplied_as_bytes else QuantizedPanelLinear)
    torch.testing.assert_close(pack_linear(weight)(x), x @ weight.T)


def test_codes_are_served_by_pytorch_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    remove_cpu_library(monkeypatch)
    weight, bias, x = torch.randn(8, 16), torch.randn(8), torch.randn(3, 16)
    for weight_format in WeightFormat:
        packed = pack_linear(quantize(weight, weight_format), bias)
        is_int8 = weight_format is WeightFormat.INT8
        assert type(packed) is (OneDnnInt8Linear if is_int8 else DequantizedLinear)
        expected = F.linear(x, rounded_weight(weight, weight_format), bias)
        bound = 0.02 if is_int8 else 1e-5  # whose activations are quantized too
        assert (packed(x) - expected).norm() < bound * expected.norm()


@needs_cpu_library
@pytest.mark.parametrize("has_amx", [False, True])
def test_packs_bf16_for_the_library_unless_onednn_has_amx(
    has_amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    weight, x = torch.randn(8, 16), torch.randn(3, 16)
    assert type(pack_linear(weight)) is PanelLinear
    assert serves_bfloat16() is (multiplies_bfloat16() and not has_amx)
    packed = pack_linear(weight.bfloat16())
    is_supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    otherwise = PackedLinear if is_supported else PanelLinear
    assert type(packed) is (BFloat16PanelLinear if serves_bfloat16() else otherwise)
    assert type(pack_linear(weight, dtype=torch.bfloat16)) is type(packed)
    assert packed(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(packed(x.bfloat16()).float(), x @ weight.T, rtol=5e-2, atol=1e-1)


@needs_cpu_library
def test_a_weight_stored_in_fp16_is_widened_for_the_library() -> None:
    weight, x = torch.randn(8, 16).half(), torch.randn(3, 16)
    packed = pack_linear(weight, dtype=torch.float32)
    assert type(packed) is PanelLinear
    torch.testing.assert_close(packed(x), x @ weight.float().T)


@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize("shape", [(8, 16), (37, 200)], ids=str)
@pytest.mark.parametrize("weight_format", [None, *WeightFormat])
def test_the_bytes_of_a_layer_are_known_without_packing_it(
    weight_format: WeightFormat | None,
    shape: tuple[int, int],
    has_library: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_library:
        remove_cpu_library(monkeypatch)
    weight = torch.randn(shape)
    for stored in (torch.float32, torch.bfloat16):
        values = quantize(weight, weight_format) if weight_format else weight.to(stored)
        packed = pack_linear(values, dtype=torch.float32)
        kind = choose_linear(values, dtype=torch.float32, device_type="cpu")
        assert type(packed).__name__ == kind
        expected = linear_bytes(values, kind, dtype=torch.float32, device_type="cpu")
        assert packed.weight_bytes == expected


@pytest.mark.parametrize("is_in_panels", [True, False])
@pytest.mark.parametrize("shape", [(8, 16), (37, 201)], ids=str)
def test_the_bytes_of_a_layer_in_bf16_are_known_without_packing_it(
    shape: tuple[int, int], is_in_panels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_packing, "serves_bfloat16", lambda: is_in_panels)
    weight, dtype = torch.randn(shape), torch.bfloat16
    kind = choose_linear(weight, dtype=dtype, device_type="cpu")
    packed = pack_linear(weight, dtype=dtype)
    assert type(packed).__name__ == kind
    assert packed.weight_bytes == linear_bytes(weight, kind, dtype=dtype, device_type="cpu")


@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize("size", [16, 48, 0])
@pytest.mark.parametrize("weight_format", WeightFormat)
def test_groups_of_any_size_are_multiplied(
    weight_format: WeightFormat, size: int, has_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_library:
        remove_cpu_library(monkeypatch)
    weight, bias, x = torch.randn(37, 200), torch.randn(37), torch.randn(5, 200)
    values = quantize(weight, weight_format, size)
    packed = pack_linear(values, bias)
    is_int8 = isinstance(packed, Int8Linear)
    assert not is_int8 or (weight_format, size) == (WeightFormat.INT8, 0)
    kind = choose_linear(values, dtype=torch.float32, device_type="cpu")
    assert type(packed).__name__ == kind
    expected_bytes = linear_bytes(values, kind, dtype=torch.float32, device_type="cpu")
    assert packed.weight_bytes == expected_bytes
    expected = F.linear(x, values.dequantize(), bias)
    bound = 0.02 if is_int8 else 1e-3  # whose activations are quantized too; of 15 bits
    assert (packed(x) - expected).norm() < bound * expected.norm()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")
def test_packs_fp32_for_onednn_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    remove_cpu_library(monkeypatch)
    packed, x = pack_linear(torch.randn(96, 256)), torch.randn(9, 256)
    assert type(packed) is PackedLinear
    alone = torch.cat([packed(row) for row in x.split(1)])
    torch.testing.assert_close(packed(x), alone, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("weight_format", [None, *WeightFormat])
def test_products_and_row_lengths_are_those_of_the_weight_as_it_is_multiplied(
    weight_format: WeightFormat | None,
) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(130, 48), torch.randn(130), torch.randn(5, 48)
    linear = pack_linear(quantize(weight, weight_format) if weight_format else weight, bias)
    if weight_format:
        weight = rounded_weight(weight, weight_format)
    expected = x @ weight.T
    assert (linear.products(x) - expected).abs().max() < 1e-5 * expected.abs().max()
    torch.testing.assert_close(linear.row_norms, weight.norm(dim=1), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 here"
)
def test_a_packed_weight_has_the_products_and_row_lengths_of_the_original() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(130, 48), torch.randn(130), torch.randn(5, 48)
    weight, bias, x = weight.bfloat16(), bias.bfloat16(), x.bfloat16()
    linear = PackedLinear(weight, bias)
    expected = x.float() @ weight.float().T
    torch.testing.assert_close(linear.products(x), expected, rtol=1e-2, atol=1e-2)
    assert torch.equal(linear.row_norms, weight.float().square().sum(dim=1).sqrt())
