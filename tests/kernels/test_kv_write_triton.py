"""Writing keys and values in Triton's interpreter, compared with the CPU implementation."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from loraplex.kernels.kv_pages import KeyPrefix, KvPages, make_pages, write_pages

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
