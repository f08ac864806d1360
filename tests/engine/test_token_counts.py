"""Counts that are kept from step to step compared with counts of the whole sequence."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.token_counts import Counted, TokenCounts

TOKENS = st.lists(st.integers(0, 12), max_size=20)


@given(prompt=TOKENS, steps=st.lists(TOKENS, max_size=6), draft=TOKENS)
def test_counts_are_those_of_the_whole_sequence(
    prompt: list[int], steps: list[list[int]], draft: list[int]
) -> None:
    counts = TokenCounts(prompt)
    output: list[int] = []
    for step in steps:
        output += step
        counts.follow([*prompt, *output])
        drafted = counts.counted(draft)
        assert by_token(counts.counted()) == expected(prompt, output)
        assert by_token(drafted) == expected(prompt, [*output, *draft])


def by_token(counted: Counted) -> dict[int, int]:
    pairs = zip(counted.output_ids.tolist(), counted.num_in_output.tolist(), strict=True)
    return dict.fromkeys(counted.token_ids.tolist(), 0) | dict(pairs)


def expected(prompt: list[int], output: list[int]) -> dict[int, int]:
    return dict.fromkeys(prompt, 0) | Counter(output)


def test_each_token_is_listed_once() -> None:
    counts = TokenCounts([3, 3, 1])
    counts.follow([3, 3, 1, 5, 3, 5])
    counted = counts.counted([7, 7, 1])
    assert sorted(counted.token_ids.tolist()) == [1, 3, 5, 7]
    assert sorted(counted.output_ids.tolist()) == [1, 3, 5, 7]
    assert sorted(counts.counted().output_ids.tolist()) == [3, 5]
