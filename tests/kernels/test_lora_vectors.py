"""Adapters' vectors: the definition against the formula, and the kernel in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from loraplex.adapters.block import VECTOR_KINDS
from loraplex.engine.model.slice_auxiliary import SliceAuxiliary, change_linear
from loraplex.kernels.lora_vectors import apply_vectors
from support.vector_steps import HELD, VectorStep

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"  # Triton 3.6's interpreter
)
OUTS = (40, 1030, 17)
"""The second takes two blocks of columns; the third makes no row a multiple of any alignment."""
ROWS = [3, -1, 0, 4, 2, 1, 3, -1, 2, 0]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BIASES = (None, torch.float32, torch.bfloat16)


def row_by_row(step: VectorStep, change: Callable[..., None]) -> Tensor:
    """What `change` makes of each row's part of each slice, given its bias and its vectors."""
    result = step.y.clone()
    for token, row in enumerate(step.rows):
        for index, columns in enumerate(step.columns):
            bias = None if step.bias is None else step.bias[columns]
            change(result[token : token + 1, columns], bias, step.vectors(row, index))
    return result


def formula(y: Tensor, bias: Tensor | None, vectors: list[Tensor | None]) -> None:
    """What is served, computed in fp64 and rounded after each operation on y."""

    def rounded(values: Tensor) -> Tensor:
        return values.to(y.dtype).double()

    magnitude, *added = vectors
    result = y.double()
    if magnitude is not None:
        product = result if bias is None else rounded(result - rounded(bias))
        result = rounded(result + product * magnitude.double())
    for vector in added:
        if vector is not None:
            result = rounded(result + vector.double())
    y.copy_(result)


def by_segments(y: Tensor, bias: Tensor | None, vectors: list[Tensor | None]) -> None:
    """As on the CPU."""
    values = {k: v for k, v in zip(VECTOR_KINDS, vectors, strict=True) if v is not None}
    change_linear(torch.empty(len(y), 8), y, bias, SliceAuxiliary(values, None))


def assert_rounds_alike(ours: Tensor, theirs: Tensor) -> None:
    """Equal, but that PyTorch may fuse a product with a sum. In half types the product is exact in
    fp32."""
    bound = 1e-6 if theirs.dtype is torch.float32 else 0.0
    torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


@pytest.mark.parametrize("bias", BIASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_definition_is_the_formula_and_what_segments_get(
    dtype: torch.dtype, bias: torch.dtype | None
) -> None:
    step = VectorStep(ROWS, outs=OUTS, dtype=dtype, bias=bias)
    result = step.apply(apply_vectors)
    assert torch.equal(result, row_by_row(step, by_segments))
    assert_rounds_alike(result, row_by_row(step, formula))


@pytest.mark.parametrize("bias", BIASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_computes_what_is_defined(
    interpreted_lora_vectors: ModuleType, dtype: torch.dtype, bias: torch.dtype | None
) -> None:
    step = VectorStep(ROWS, outs=OUTS, dtype=dtype, bias=bias)
    result = step.apply(interpreted_lora_vectors.apply_vectors)
    assert_rounds_alike(result, step.defined())
    untouched = [token for token, row in enumerate(ROWS) if row < 0 or not HELD[row]]
    assert torch.equal(result[untouched], step.y[untouched])


def test_what_shares_the_step_changes_no_bit_of_a_row(interpreted_lora_vectors: ModuleType) -> None:
    step = VectorStep(ROWS, outs=OUTS, dtype=torch.bfloat16, bias=torch.bfloat16)
    assert step.changed_alone(interpreted_lora_vectors.apply_vectors) == []


@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy computes the interpreted overflow
def test_overflow_of_one_adapter_leaves_all_other_rows_bit_identical(
    interpreted_lora_vectors: ModuleType, poison: float
) -> None:
    step = VectorStep(ROWS, outs=OUTS, dtype=torch.bfloat16)
    clean = step.apply(interpreted_lora_vectors.apply_vectors)
    for index in HELD[3]:
        for vector in step.vectors(3, index):
            if vector is not None:
                vector.fill_(poison)
    poisoned = step.apply(interpreted_lora_vectors.apply_vectors)
    own = torch.tensor(ROWS) == 3
    assert torch.equal(poisoned[~own], clean[~own])
    assert not poisoned[own].isfinite().all(-1).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.zeros(len(ROWS), 5)}, "y is"),
        ({"y": torch.zeros(sum(OUTS), len(ROWS)).T}, "y is"),
        ({"y": torch.zeros(len(ROWS), sum(OUTS), dtype=torch.float16)}, "float16, the arena"),
        ({"token_rows": torch.zeros(3, dtype=torch.int32)}, "for 3 tokens"),
    ],
    ids=["columns", "strides", "dtype", "tokens"],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    step = VectorStep(ROWS, outs=OUTS)
    given = {
        "y": step.y,
        "weights": step.weights,
        "token_rows": torch.tensor(ROWS, dtype=torch.int32),
        "base_bias": None,
        "first_slice": 1,
        "slice_outs": OUTS,
    }
    with pytest.raises(ValueError, match=message):
        apply_vectors(**{**given, **change})
