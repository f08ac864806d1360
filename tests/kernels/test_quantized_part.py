"""A part of a quantized weight against the part of its dense values."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from loraplex.kernels.linear_packing import pack_readable
from loraplex.kernels.quantize import WeightFormat, quantize
from loraplex.kernels.quantized_part import part_of
from loraplex.kernels.quantized_weight import CodeType, QuantizedWeight
from support.quantized_weights import CASES, Case, make_weight

ZERO_FIRST = torch.arange(16.0)
"""A table with a code that stands for zero."""


def cuts(size: int, count: int) -> list[range]:
    """`count` parts of a size, which may differ by one."""
    ends = [size * index // count for index in range(count + 1)]
    return [range(*pair) for pair in pairwise(ends)]


def with_zero(weight: QuantizedWeight) -> QuantizedWeight:
    """The weight with a table and zero points whose zero is a code."""
    zero = weight.zero
    if zero is not None:
        zero = zero.round().clamp(-8, 7).to(torch.int8)
    return replace(weight, table=None if weight.table is None else ZERO_FIRST, zero=zero)


@pytest.mark.parametrize("num_parts", [2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_part_has_the_values_of_the_whole(case: Case, num_parts: int) -> None:
    whole = with_zero(make_weight(case))
    values = whole.dequantize()
    out_features, in_features = whole.shape
    outputs = range(out_features // 3, out_features)
    for inputs in cuts(in_features, num_parts):
        part = part_of(whole, outputs, inputs)
        assert part is not None
        expected = values[outputs.start : outputs.stop, inputs.start : inputs.stop]
        assert torch.equal(part.dequantize(), expected)
        assert part.num_inputs == len(inputs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_packed_part_multiplies_as_its_values_do(case: Case) -> None:
    whole = with_zero(make_weight(case))
    out_features, in_features = whole.shape
    inputs = cuts(in_features, 2)[1]
    part = part_of(whole, range(out_features), inputs)
    assert part is not None
    x = torch.randn(3, len(inputs), generator=torch.Generator().manual_seed(4))
    expected = x @ part.dequantize().T
    y = pack_readable(part).products(x)
    assert (y - expected).abs().max() < 1e-5 * expected.abs().max()


def test_parts_of_whole_groups_keep_the_groups() -> None:
    whole = quantize(torch.randn(8, 512), WeightFormat.INT4)
    part = part_of(whole, range(8), range(128, 384))
    assert part is not None
    assert part.group == 128
    assert torch.equal(part.scale, whole.scale[:, 1:3])


def test_a_part_that_ends_within_a_group_has_smaller_groups() -> None:
    whole = quantize(torch.randn(8, 384), WeightFormat.INT4)
    part = part_of(whole, range(8), range(192, 384))
    assert part is not None
    assert part.group == 64
    assert part.num_filling == 0


def test_a_scale_of_a_whole_row_stays_one() -> None:
    whole = quantize(torch.randn(8, 96), WeightFormat.INT8)
    part = part_of(whole, range(8), range(17, 48))
    assert part is not None
    assert torch.equal(part.scale, whole.scale)


def test_an_act_order_that_mixes_ranks_fills_groups_up() -> None:
    weight = quantize(torch.randn(4, 256), WeightFormat.INT4)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    ordered = replace(weight, order=order)
    for inputs in cuts(256, 2):
        part = part_of(ordered, range(4), inputs)
        assert part is not None
        assert part.group == 16
        assert 0 < part.num_filling < 32


def test_an_act_order_within_a_rank_keeps_the_groups() -> None:
    weight = quantize(torch.randn(4, 256), WeightFormat.INT4)
    order = torch.cat([torch.arange(128).flip(0), 128 + torch.arange(128).flip(0)])
    part = part_of(replace(weight, order=order), range(4), range(128, 256))
    assert part is not None
    assert (part.group, part.num_filling) == (128, 0)
    assert part.order is not None
    assert torch.equal(part.order, torch.arange(128).flip(0))


def test_groups_are_not_filled_up_where_no_code_stands_for_zero() -> None:
    weight = make_weight(Case(CodeType.TABLE4, 32, shape=(4, 96)))
    table = torch.arange(1.0, 17.0)
    assert part_of(replace(weight, table=table), range(4), range(24)) is None
    assert part_of(replace(weight, table=table), range(4), range(48)) is not None
    fractions = make_weight(Case(CodeType.INT4, 32, torch.float32, torch.float32, shape=(4, 96)))
    assert part_of(fractions, range(4), range(24)) is None


def test_a_part_does_not_keep_the_whole_in_memory() -> None:
    whole = quantize(torch.randn(64, 256), WeightFormat.INT8)
    for inputs in (range(256), range(128)):
        part = part_of(whole, range(16), inputs)
        assert part is not None
        assert part.codes.untyped_storage().nbytes() == 16 * len(inputs)
