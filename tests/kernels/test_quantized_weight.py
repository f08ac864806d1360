"""Quantized weights of every code type, against the formula written out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loraplex.kernels.quantized_weight import CodeType, QuantizedWeight, stack_rows
from support.quantized_weights import CASES, Case, make_weight, plain_values


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dequantizing_equals_the_formula(case: Case) -> None:
    quantized = make_weight(case)
    assert torch.equal(quantized.dequantize(), plain_values(quantized))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_rounded_once(dtype: torch.dtype) -> None:
    quantized = make_weight(CASES[0])
    assert torch.equal(quantized.dequantize(dtype), plain_values(quantized).to(dtype))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row_norms_are_those_of_the_dequantized_weight(case: Case) -> None:
    quantized = make_weight(case)
    expected = plain_values(quantized).double().norm(dim=1)
    assert torch.allclose(quantized.row_norms().double(), expected, rtol=1e-6)


def test_stacked_parts_have_their_rows_below_one_another() -> None:
    for case in CASES:
        first, second = make_weight(case), make_weight(case, seed=1)
        second = replace(second, order=first.order)
        stacked = stack_rows([first, second])
        assert stacked is not None
        expected = torch.cat([first.dequantize(), second.dequantize()])
        assert torch.equal(stacked.dequantize(), expected)


def test_parts_of_other_forms_are_not_stacked() -> None:
    plain = QuantizedWeight(
        CodeType.INT4, torch.zeros(4, 64, dtype=torch.int8), torch.ones(4, 2), 32
    )
    others = [
        replace(plain, code_type=CodeType.INT8),
        replace(plain, scale=plain.scale.half()),
        replace(plain, scale=torch.ones(4, 1), group=64),
        replace(plain, zero=torch.zeros(4, 2)),
        replace(plain, order=torch.arange(64)),
        replace(plain, code_type=CodeType.TABLE4, table=torch.arange(16.0)),
    ]
    assert stack_rows([plain, plain]) is not None
    for other in others:
        assert stack_rows([plain, other]) is None
    other_order = replace(plain, order=torch.arange(64).flip(0))
    assert stack_rows([others[4], other_order]) is None


def test_a_scale_for_each_group_is_required() -> None:
    with pytest.raises(AssertionError, match="each row and group"):
        QuantizedWeight(CodeType.INT8, torch.zeros(4, 65, dtype=torch.int8), torch.ones(4, 2), 32)
