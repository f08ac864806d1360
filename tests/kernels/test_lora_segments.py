"""Segments compared with the reference, in memory full of NaN."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from loraplex.kernels.lora import add_segments
from loraplex.kernels.lora_batch import Segment
from loraplex.kernels.lora_reference import add_lora_reference
from support.lora_weights import PoisonedWeights, assert_lora_close, make_layout

FIRST_SLICE = 1
IN_FEATURES, OUTS = 133, (63, 20, 20)
LAYOUT = make_layout((8, (8,)), (IN_FEATURES, OUTS))
RANKS = (
    {1: 1, 2: 1, 3: 1},
    {1: 4, 3: 2},
    {2: 7},
    {1: 16, 2: 16, 3: 16},
    {1: 64, 2: 3, 3: 64},
    {0: 5},
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def make_weights(dtype: torch.dtype = torch.float32) -> PoisonedWeights:
    weights = PoisonedWeights(LAYOUT, num_rows=8, dtype=dtype, capacity=1 << 19)
    for row, ranks in enumerate(RANKS):
        weights.put(row, ranks)
    return weights


def draw(num_tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, IN_FEATURES, generator=generator)
    y = torch.randn(num_tokens, sum(OUTS), generator=generator)
    return x.to(dtype), y.to(dtype)


def run(
    weights: PoisonedWeights,
    x: Tensor,
    y: Tensor,
    runs: Sequence[tuple[int, int]],
) -> Tensor:
    """`runs`: (row, number of tokens), -1 for the base; they are in the order of the tokens."""
    result, parts, start = y.clone(), [], 0
    for row, length in runs:
        if row >= 0:
            parts.append(Segment(start, start + length, row))
        start += length
    add_segments(x, result, weights, parts, first_slice=FIRST_SLICE, slice_outs=OUTS)
    return result


def reference(
    weights: PoisonedWeights, x: Tensor, y: Tensor, runs: Sequence[tuple[int, int]]
) -> Tensor:
    expected = y.clone()
    rows = torch.tensor([row for row, length in runs for _ in range(length)])
    table = weights.table[:, FIRST_SLICE : FIRST_SLICE + len(OUTS)]
    add_lora_reference(x, expected, weights.flat, table, rows, slice_outs=OUTS)
    return expected


@DTYPES
@pytest.mark.parametrize("lengths", [(1,), (2,), (3, 1), (63, 5), (1, 16, 7, 30, 2, 9)])
def test_segments_equal_the_reference(dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    weights = make_weights(dtype)
    runs = [(-1, 3), *enumerate(lengths)]
    x, y = draw(3 + sum(lengths), dtype)
    result = run(weights, x, y, runs)
    assert_lora_close(result, reference(weights, x, y, runs))
    assert torch.equal(result[:3], y[:3])


@DTYPES
def test_segments_equal_the_reference_while_adapters_leave_and_others_take_over_their_rows(
    dtype: torch.dtype,
) -> None:
    rng = random.Random(0)
    weights = make_weights(dtype)
    resident = set(range(len(RANKS)))
    for _ in range(200):
        row = rng.randrange(8)
        if row in resident and rng.random() < 0.7:
            resident.remove(row)
            weights.remove(row)
        if row not in resident:
            weights.put(row, rng.choice(RANKS))
            resident.add(row)
        runs = [(rng.choice([*sorted(resident), -1]), rng.randint(1, 4)) for _ in range(5)]
        x, y = draw(sum(length for _, length in runs), dtype)
        result = run(weights, x, y, runs)
        assert_lora_close(result, reference(weights, x, y, runs))


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_a_decoding_token_gets_the_same_bits_whoever_shares_its_step(num_tokens: int) -> None:
    """Its row begins at the same alignment wherever it stands, as in models of usual widths."""
    in_features, outs = 160, (64, 32)
    weights = PoisonedWeights(make_layout((in_features, outs)), num_rows=2)
    for row in range(2):
        weights.put(row, {0: 8, 1: 8})
    x, y = torch.randn(20, in_features), torch.randn(20, sum(outs))
    bounds = pairwise((0, 5, 5 + num_tokens, 20))
    segments = [Segment(start, end, index % 2) for index, (start, end) in enumerate(bounds)]
    crowd = y.clone()
    add_segments(x, crowd, weights, segments, first_slice=0, slice_outs=outs)
    for token in range(5, 5 + num_tokens):
        own, alone = slice(token, token + 1), y[token : token + 1].clone()
        lone = [Segment(0, 1, 1)]
        add_segments(x[own], alone, weights, lone, first_slice=0, slice_outs=outs)
        assert torch.equal(crowd[own], alone)


@DTYPES
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
def test_overflow_stays_in_the_tokens_it_comes_from(
    dtype: torch.dtype, length: int, poison: float
) -> None:
    weights = make_weights(dtype)
    runs = [(3, length), (4, length), (3, length), (-1, 1)]
    x, y = draw(3 * length + 1, dtype)
    clean = run(weights, x, y, runs)
    x[0] = poison
    spoilt = run(weights, x, y, runs)
    assert not spoilt[0].isfinite().all()
    assert torch.equal(spoilt[1:], clean[1:])
    x, y = draw(3 * length + 1, dtype)
    assert torch.equal(run(weights, x, y, runs), clean), "nothing is left of it"
