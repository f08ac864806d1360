"""Writing keys and values in Triton's interpreter, compared with the CPU implementation."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from loraplex.kernels.kv_groups import GroupedPages, OpenBlocks, stack_grouped_pages
from loraplex.kernels.kv_pages import KeyPrefix, KvPages, make_pages, write_pages
from support.attention_cases import pages_apart
from support.marks import marked_slow

pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow) encountered:RuntimeWarning",
    "ignore:Conversion of an array with ndim:DeprecationWarning",  # Triton 3.6's interpreter
)
CPU = torch.device("cpu")
SLOTS = torch.tensor([5, 12, 7, 30, 8])
FORMS = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "int8": (torch.float32, torch.int8),
    "int8-of-bf16": (torch.bfloat16, torch.int8),
    "fp8-of-bf16": (torch.bfloat16, torch.float8_e4m3fn),
}


def pages_pair(dtype: torch.dtype, code_dtype: torch.dtype | None) -> tuple[KvPages, KvPages]:
    """Of keys of 24 elements and values of 5."""
    keys, values = (
        make_pages((8, 4, 3, dim), dtype=dtype, code_dtype=code_dtype, device=CPU)
        for dim in (24, 5)
    )
    return keys, values


def draw(dtype: torch.dtype, dim: int, code_dtype: torch.dtype | None = None) -> torch.Tensor:
    """As the model gives them: heads before tokens. Of every magnitude, and one of zeros.

    Their scales, and e4m3 codes, need no rounding, for Triton's interpreter cuts those off.
    """
    largest = 448.0 if code_dtype is torch.float8_e4m3fn else 127.0
    vectors = torch.randn(3, len(SLOTS), dim).clamp(-2, 2) * largest / 2
    if code_dtype is torch.float8_e4m3fn:
        vectors = vectors.to(code_dtype).float()
    vectors[..., 2] = -largest
    vectors *= torch.tensor([2.0**-90, 2.0**-20, 1.0, 4.0, 2.0**60])[:, None]
    vectors[1, 2] = 0
    return vectors.to(dtype).transpose(0, 1)


@pytest.mark.parametrize(("dtype", "code_dtype"), FORMS.values(), ids=FORMS)
def test_writes_what_the_pages_write(
    interpreted_kv_write: ModuleType, dtype: torch.dtype, code_dtype: torch.dtype | None
) -> None:
    keys, values = pages_pair(dtype, code_dtype)
    expected_keys, expected_values = pages_pair(dtype, code_dtype)
    k, v = draw(dtype, 24, code_dtype), draw(dtype, 5, code_dtype)
    expected_keys.write(SLOTS, k)
    expected_values.write(SLOTS, v)
    interpreted_kv_write.write_pages(keys, values, SLOTS, k, v)
    for pages, expected in ((keys, expected_keys), (values, expected_values)):
        for tensor, other in zip(pages.tensors, expected.tensors, strict=True):
            assert torch.equal(tensor, other)


@pytest.mark.parametrize("name", marked_slow(["fp32", "int8-of-bf16"], slow={"fp32"}))
def test_blocks_that_lie_far_apart_get_the_same(
    interpreted_kv_write: ModuleType, name: str
) -> None:
    """The blocks' elements have numbers beyond 32 bits if they are bytes."""
    dtype, code_dtype = FORMS[name]
    num_before, size = 1030 if code_dtype else 0, 4
    expected = pages_pair(dtype, code_dtype)
    keys, values = pages_apart(*expected, dtype=dtype, num_before=num_before)
    k, v = draw(dtype, 24, code_dtype), draw(dtype, 5, code_dtype)
    interpreted_kv_write.write_pages(keys, values, SLOTS + num_before * size, k, v)
    interpreted_kv_write.write_pages(*expected, SLOTS, k, v)
    for pages, others in zip((keys, values), expected, strict=True):
        for tensor, other in zip(pages.tensors, others.tensors, strict=True):
            assert torch.equal(tensor[num_before:], other)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_vector_that_is_not_finite_reads_as_nan_alone(
    interpreted_kv_write: ModuleType, value: float
) -> None:
    keys, values = pages_pair(torch.float32, torch.int8)
    k, v = draw(torch.float32, 24), draw(torch.float32, 5)
    k[3, 1, 6] = value
    interpreted_kv_write.write_pages(keys, values, SLOTS, k, v)
    read = keys.gather(torch.arange(8)).flatten(0, 1)[SLOTS]
    assert read[3, 1].isnan().all()
    read[3, 1] = 0
    assert read.isfinite().all()


def test_a_token_without_a_slot_is_left_out(interpreted_kv_write: ModuleType) -> None:
    keys, values = pages_pair(torch.float32, None)
    interpreted_kv_write.write_pages(
        keys, values, torch.tensor([-1, 9]), torch.ones(2, 3, 24), torch.ones(2, 3, 5)
    )
    assert keys.data.view(32, -1).any(-1).nonzero().tolist() == [[9]]
    assert values.data.view(32, -1).any(-1).nonzero().tolist() == [[9]]


@pytest.mark.parametrize("form", ["fp32", "int8"])
def test_values_that_are_a_part_of_keys_are_not_written(
    interpreted_kv_write: ModuleType, form: str
) -> None:
    dtype, code_dtype = FORMS[form]
    (keys, _), (expected, _) = pages_pair(dtype, code_dtype), pages_pair(dtype, code_dtype)
    k = draw(dtype, 24, code_dtype)
    write_pages(expected, KeyPrefix(expected, 16), SLOTS, k, None)
    interpreted_kv_write.write_pages(keys, KeyPrefix(keys, 16), SLOTS, k, None)
    for tensor, other in zip(keys.tensors, expected.tensors, strict=True):
        assert torch.equal(tensor, other)


GROUPED_CASES = {
    "int4": (4, (8, 2, 16, 16), torch.float32),
    "int2": (2, (8, 2, 16, 16), torch.float32),
    "int4-of-bf16": (4, (8, 2, 16, 16), torch.bfloat16),
    "served-sizes": (4, (64, 2, 64, 128), torch.bfloat16),
    "odd-sizes": (2, (12, 3, 12, 80), torch.float32),
}
"""Bits; tokens of a block, heads, elements of a key and of a value; dtype of open blocks."""


def grouped_pages(
    bits: int, size: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[GroupedPages, GroupedPages]:
    """Eight blocks, of which three are open."""
    block_size, heads, *dims = size
    blocks = OpenBlocks(8, 5, CPU)
    blocks.open([6, 1, 3], [2, 5, 1])
    keys, values = (
        stack_grouped_pages(
            1,
            (8, block_size, heads, dim),
            dtype=dtype,
            bits=bits,
            is_key=is_key,
            blocks=blocks,
            device=CPU,
        ).pages[0]
        for dim, is_key in zip(dims, (True, False), strict=True)
    )
    assert isinstance(keys, GroupedPages)
    assert isinstance(values, GroupedPages)
    return keys, values


def assert_equal_pages(ours: GroupedPages, expected: GroupedPages) -> None:
    assert torch.equal(ours.opened, expected.opened)
    for tensor, other in zip(ours.tensors, expected.tensors, strict=True):
        assert torch.equal(tensor, other)


@pytest.mark.parametrize("case", marked_slow(GROUPED_CASES, slow={"served-sizes"}))
def test_the_last_token_of_a_block_brings_its_codes(
    interpreted_kv_write: ModuleType, case: str
) -> None:
    """In two steps; block 3 stays without its last token."""
    bits, size, dtype = GROUPED_CASES[case]
    block_size, heads, key_dim, value_dim = size
    ours, expected = (grouped_pages(bits, size, dtype) for _ in range(2))
    places = torch.cat([block * block_size + torch.arange(block_size) for block in (6, 3)])[:-1]
    for slots in places.tensor_split([block_size // 2 + 1]):
        k, v = (
            (100 * torch.randn(len(slots), heads, dim) + torch.linspace(-300, 90, dim)).to(dtype)
            for dim in (key_dim, value_dim)
        )
        k[:, 0, 3], v[:, 0] = 0.1, -3.0  # groups of equal elements
        order = torch.randperm(len(slots))
        write_pages(*expected, slots[order], k, v)
        interpreted_kv_write.write_pages(*ours, slots[order], k, v)
    for pages, others in zip(ours, expected, strict=True):
        assert_equal_pages(pages, others)
        assert pages.data[6].any()
        assert not pages.data[3].any()


def test_padding_and_complete_blocks_are_not_written(interpreted_kv_write: ModuleType) -> None:
    keys, values = grouped_pages(4, (8, 2, 16, 16), torch.float32)
    keys.blocks.open([7], [0])  # the spare block, to which padding writes
    before = keys.opened.clone()
    slots = torch.tensor([-1, 2 * 8 + 7, 7 * 8])
    vectors = torch.full((3, 2, 16), 5.0)
    interpreted_kv_write.write_pages(keys, values, slots, vectors, vectors)
    for pages in (keys, values):
        assert not pages.data.any()
        assert torch.equal(pages.opened[1:], before[1:])
        assert pages.opened[0].view(8, -1).any(1).tolist() == [True] + [False] * 7


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_group_that_is_not_finite_reads_as_nan_alone(
    interpreted_kv_write: ModuleType, value: float
) -> None:
    keys, values = grouped_pages(4, (8, 2, 16, 128), torch.float32)
    k, v = torch.randn(8, 2, 16), torch.randn(8, 2, 128)
    k[3, 1, 6] = v[5, 0, 70] = value
    interpreted_kv_write.write_pages(keys, values, torch.arange(48, 56), k, v)
    block = torch.tensor([6])
    read_keys, read_values = keys.gather(block)[0], values.gather(block)[0]
    assert read_keys[:, 1, 6].isnan().all()
    assert read_values[5, 0, 64:].isnan().all()
    assert read_keys.isnan().sum() == 8
    assert read_values.isnan().sum() == 64
