"""The base matmul of an MoE layer, compared with one product per pair."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loraplex.kernels.expert_pairs import ExpertPairs, sort_held_pairs, sort_pairs
from loraplex.kernels.grouped_linear import grouped_linear, multiply_each, multiply_grouped

NUM_EXPERTS, IN_FEATURES, OUT_FEATURES = 6, 16, 24


def make_pairs(num_tokens: int) -> ExpertPairs:
    """Of random experts, of which the last is never chosen."""
    chosen = [torch.randperm(NUM_EXPERTS - 1)[:2] for _ in range(num_tokens)]
    return sort_pairs(torch.stack(chosen), NUM_EXPERTS)


def expected(x: Tensor, weight: Tensor, pairs: ExpertPairs) -> Tensor:
    return torch.einsum("pi,poi->po", x.double(), weight[pairs.experts].double())


@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_each_pair_meets_the_matrix_of_its_expert(num_tokens: int, is_transposed: bool) -> None:
    pairs = make_pairs(num_tokens)
    weight = torch.randn(NUM_EXPERTS, OUT_FEATURES, IN_FEATURES)
    x = torch.randn(pairs.num_pairs, IN_FEATURES)
    stored = weight.transpose(1, 2).contiguous() if is_transposed else weight
    y = grouped_linear(x, stored, pairs, is_transposed=is_transposed)
    torch.testing.assert_close(y.double(), expected(x, weight, pairs), rtol=1e-5, atol=1e-5)


def test_the_grouped_kernel_and_the_loop_agree() -> None:
    pairs = make_pairs(40)
    weight = torch.randn(NUM_EXPERTS, OUT_FEATURES, IN_FEATURES).bfloat16()
    x = torch.randn(pairs.num_pairs, IN_FEATURES).bfloat16()
    for multiply in (multiply_grouped, multiply_each):
        y = multiply(x, weight.transpose(1, 2), pairs)
        torch.testing.assert_close(y.double(), expected(x, weight, pairs), rtol=2e-2, atol=4e-2)


def test_a_row_that_is_not_finite_stays_in_its_row() -> None:
    pairs = make_pairs(20)
    weight = torch.randn(NUM_EXPERTS, OUT_FEATURES, IN_FEATURES)
    x = torch.randn(pairs.num_pairs, IN_FEATURES)
    clean = grouped_linear(x, weight, pairs)
    x[3] = torch.nan
    dirty = grouped_linear(x, weight, pairs)
    others = torch.arange(pairs.num_pairs) != 3
    assert torch.equal(dirty[others], clean[others])
    assert dirty[3].isnan().all()


@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("held", [range(3), range(3, 6), range(5, 6)], ids=str)
def test_the_pairs_of_some_experts_are_those_of_all_without_the_others(
    held: range, has_adapters: bool
) -> None:
    chosen = torch.stack([torch.randperm(NUM_EXPERTS - 1)[:2] for _ in range(20)])
    token_rows = torch.randint(-1, 3, (20,)) if has_adapters else None
    whole = sort_pairs(chosen, NUM_EXPERTS, token_rows, 3)
    own = sort_held_pairs(chosen, held, token_rows, 3)
    is_held = (whole.experts >= held.start) & (whole.experts < held.stop)
    assert torch.equal(own.order, whole.order[is_held])
    assert torch.equal(own.tokens, whole.tokens[is_held])
    assert torch.equal(own.experts, whole.experts[is_held] - held.start)
    assert own.num_experts == len(held)
    assert (own.rows is None) == (whole.rows is None)
    if own.rows is not None and whole.rows is not None:
        assert torch.equal(own.rows, whole.rows[is_held])
    segments = [(own.experts[part.start].item(), part.row) for part in own.segments]
    assert segments == sorted(set(segments)), "each expert and adapter once"
