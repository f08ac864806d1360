"""A self-test keeps some logits of a large vocabulary, and misses no position and no token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loraplex.engine.model.expected_logits import ExpectedLogits

NUM_POSITIONS = 23


def expected(vocab_size: int) -> tuple[ExpectedLogits, Tensor]:
    logits = torch.randn(NUM_POSITIONS, vocab_size, generator=torch.Generator().manual_seed(0))
    return ExpectedLogits.of(logits), logits


def test_the_error_is_the_largest_difference_relative_to_the_largest_logit() -> None:
    kept, logits = expected(100)
    ours = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    largest_difference = (ours - logits)[5:9].abs().max()
    assert kept.error(slice(5, 9), ours[5:9]) == largest_difference / logits.abs().max()


@pytest.mark.parametrize("vocab_size", [8193, 64_000, 262_147])
def test_an_error_of_one_token_is_found_at_some_position_and_of_one_position_at_some_token(
    vocab_size: int,
) -> None:
    kept, logits = expected(vocab_size)
    for token in (0, 1, 8192, vocab_size - 1):
        wrong = logits.clone()
        wrong[:, token] += 1
        assert kept.error(slice(0, NUM_POSITIONS), wrong) > 0.1
    for position in range(NUM_POSITIONS):
        rows = slice(position, position + 1)
        assert kept.error(rows, logits[rows]) == 0
        assert kept.error(rows, logits[rows] + 1) > 0.1


def test_a_position_of_a_large_vocabulary_keeps_few_logits_of_its_own_memory() -> None:
    kept, logits = expected(64_000)
    num_bytes = sum(row.untyped_storage().nbytes() for row in kept.kept)
    assert num_bytes <= 4 * 8192 * NUM_POSITIONS
    assert kept.largest == logits.abs().max()
