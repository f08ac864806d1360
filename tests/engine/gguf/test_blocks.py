"""The blocks of GGUF files against the `gguf` package's own conversion to numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loraplex.engine.errors import QuantizedBase
from loraplex.engine.gguf.blocks import read_dense, unpack_blocks
from loraplex.engine.gguf.kinds import BLOCK_SIZES, KIND_NAMES, QUANTIZED_KINDS
from loraplex.kernels.quantized_weight import CodeType, QuantizedWeight

gguf = pytest.importorskip("gguf")

from support.gguf_files import SCALES, dequantized, random_blocks  # noqa: E402 - it needs gguf

ROWS, COLUMNS = 300, 512
WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""The quantized kinds that the package can write."""


def assert_same(weight: QuantizedWeight, data: Tensor, kind: str) -> None:
    """Equal within 1e-6 of the largest number of the block."""
    expected = dequantized(data, kind)
    shape = (len(expected), -1, QUANTIZED_KINDS[kind].values)
    error = (weight.dequantize() - expected).view(shape).abs().amax(dim=2)
    largest = expected.view(shape).abs().amax(dim=2)
    assert (error <= 1e-6 * largest).all()


@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_any_block_gives_the_numbers_of_its_format(kind: str) -> None:
    data = random_blocks(kind, ROWS, COLUMNS)
    weight = unpack_blocks(data, kind, COLUMNS)
    assert weight.shape == (ROWS, COLUMNS)
    assert weight.scale.dtype is torch.float32
    assert_same(weight, data, kind)


@pytest.mark.parametrize("kind", WRITTEN)
def test_written_blocks_give_about_the_numbers_they_were_written_from(kind: str) -> None:
    numbers = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    written = gguf.quants.quantize(numbers.numpy(), gguf.GGMLQuantizationType[kind])
    data = torch.from_numpy(written)
    weight = unpack_blocks(data, kind, COLUMNS)
    assert_same(weight, data, kind)
    assert (weight.dequantize() - numbers).abs().max() < 0.6


@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_a_single_row_and_none(kind: str) -> None:
    data = random_blocks(kind, 1, COLUMNS)
    assert_same(unpack_blocks(data, kind, COLUMNS), data, kind)
    assert unpack_blocks(data[:0], kind, COLUMNS).dequantize().shape == (0, COLUMNS)


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"])
def test_a_block_without_scale_keeps_its_minimum(kind: str) -> None:
    data = random_blocks(kind, ROWS, COLUMNS)
    start = SCALES[kind][0]
    data.view(-1, QUANTIZED_KINDS[kind].num_bytes)[::2, start : start + 2] = 0
    weight = unpack_blocks(data, kind, COLUMNS)
    assert dequantized(data, kind).any(dim=1).all()
    assert_same(weight, data, kind)


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"])
def test_a_scale_far_below_the_minimum(kind: str) -> None:
    data = random_blocks(kind, ROWS, COLUMNS)
    start = SCALES[kind][0]
    data.view(-1, QUANTIZED_KINDS[kind].num_bytes)[:, start : start + 2] = torch.tensor([1, 0])
    assert_same(unpack_blocks(data, kind, COLUMNS), data, kind)


@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_codes_have_no_more_bits_than_the_format(kind: str) -> None:
    weight = unpack_blocks(random_blocks(kind, ROWS, COLUMNS), kind, COLUMNS)
    low, high = {
        CodeType.INT4: (-8, 7),
        CodeType.TABLE4: (0, 15),
        CodeType.INT8: (-128, 127),
    }[weight.code_type]
    assert weight.codes.min() >= low
    assert weight.codes.max() <= high
    bits = int(kind.lstrip("IQ")[0])
    assert weight.code_type.bits == (4 if bits <= 4 else 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_unquantized_numbers_are_as_they_were(dtype: torch.dtype) -> None:
    numbers = torch.randn(3, 5, generator=torch.Generator().manual_seed(2)).to(dtype)
    kind = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    assert torch.equal(read_dense(numbers.view(torch.uint8), kind), numbers)


@pytest.mark.parametrize("kind", ["IQ2_XXS", "MXFP4", "I32"])
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    data = torch.zeros(1, 64, dtype=torch.uint8)
    with pytest.raises(QuantizedBase, match=kind):
        unpack_blocks(data, kind, 256)
    with pytest.raises(QuantizedBase, match=kind):
        read_dense(data, kind)


def test_names_and_sizes_are_those_of_the_package() -> None:
    names = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    assert {number: names.get(number) for number in KIND_NAMES} == KIND_NAMES
    sizes = gguf.constants.GGML_QUANT_SIZES
    for kind, size in BLOCK_SIZES.items():
        assert size == sizes[gguf.GGMLQuantizationType[kind]]
