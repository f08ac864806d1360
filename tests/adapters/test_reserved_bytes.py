"""Adapters take only their own size: no slots of one rank, no padding to the largest."""

from __future__ import annotations

import pytest
import torch

from support.reserved_bytes import (
    make_mixed_layout,
    measure_reserved_bytes,
    mixed_plans,
    reserved_over_true,
    true_elements,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_mixed_adapters_reserve_hardly_more_than_they_are(dtype: torch.dtype) -> None:
    found = measure_reserved_bytes(dtype)
    assert found.arena >= found.true
    assert found.ratio <= 1.1


def test_the_evidence_is_the_same_figure() -> None:
    assert reserved_over_true() == measure_reserved_bytes().ratio


def test_the_adapters_differ_in_what_they_are() -> None:
    """A slot for the largest would hold many times what the others are."""
    sizes = sorted(true_elements(plan) for plan in mixed_plans(make_mixed_layout()))
    assert len(sizes) >= 12
    assert sizes[-1] > 50 * sizes[0]
    assert sizes[-1] * len(sizes) > 3 * sum(sizes)
