"""The base's linear layers without quantization, and the chosen implementation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from loraplex.kernels.int4_linear import Int4Linear
from loraplex.kernels.int8_linear import Int8Linear
from loraplex.kernels.linear import DenseLinear, Linear, PackedLinear
from loraplex.kernels.linear_cpu import PanelLinear
from loraplex.kernels.linear_packing import Bits, pack_linear
from support.cpu_kernels import needs_cpu_library, remove_cpu_library
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


def test_packs_codes_when_asked_and_keeps_the_values_otherwise() -> None:
    weight, x = torch.randn(8, 16), torch.randn(3, 16)
    assert isinstance(pack_linear(weight, bits=8), Int8Linear)
    assert isinstance(pack_linear(weight, bits=4), Int4Linear)
    torch.testing.assert_close(pack_linear(weight)(x), x @ weight.T)


@needs_cpu_library
def test_packs_fp32_for_the_library_and_bf16_for_onednn_where_the_processor_multiplies_it() -> None:
    weight, x = torch.randn(8, 16), torch.randn(3, 16)
    assert type(pack_linear(weight)) is PanelLinear
    packed = pack_linear(weight.bfloat16())
    is_supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert type(packed) is (PackedLinear if is_supported else PanelLinear)
    assert packed(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(packed(x.bfloat16()).float(), x @ weight.T, rtol=5e-2, atol=1e-1)


@needs_cpu_library
def test_a_weight_stored_in_fp16_is_widened_for_the_library() -> None:
    weight, x = torch.randn(8, 16).half(), torch.randn(3, 16)
    packed = pack_linear(weight, dtype=torch.float32)
    assert type(packed) is PanelLinear
    torch.testing.assert_close(packed(x), x @ weight.float().T)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")
def test_packs_fp32_for_onednn_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    remove_cpu_library(monkeypatch)
    packed, x = pack_linear(torch.randn(96, 256)), torch.randn(9, 256)
    assert type(packed) is PackedLinear
    alone = torch.cat([packed(row) for row in x.split(1)])
    torch.testing.assert_close(packed(x), alone, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("bits", "bound"), [(None, 1e-5), (8, 1e-5), (4, 2**-8)])
def test_products_and_row_lengths_are_those_of_the_weight_as_it_is_multiplied(
    bits: Bits | None, bound: float
) -> None:
    """int4 products are rounded to bf16 on the CPU."""
    torch.manual_seed(0)
    weight, bias, x = torch.randn(130, 48), torch.randn(130), torch.randn(5, 48)
    linear = pack_linear(weight, bias, bits=bits)
    if bits:
        weight = rounded_weight(weight, bits)
    expected = x @ weight.T
    assert (linear.products(x) - expected).abs().max() < bound * expected.abs().max()
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
