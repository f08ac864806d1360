"""Tokens are divided among ranks in their order, in whole units of rows."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.shards.vocabulary_plan import ROWS_PER_UNIT, divide_vocabulary


@given(num_tokens=st.integers(1, 300_000), num_ranks=st.integers(2, 16))
def test_the_ranks_have_all_tokens_in_order_and_each_some(num_tokens: int, num_ranks: int) -> None:
    parts = divide_vocabulary(num_tokens, num_ranks)
    if num_tokens <= ROWS_PER_UNIT * (num_ranks - 1):
        assert parts == ()
        return
    assert list(chain.from_iterable(part.tokens for part in parts)) == list(range(num_tokens))
    sizes = [len(part.tokens) for part in parts]
    assert len(sizes) == num_ranks
    assert min(sizes) > 0
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] < 2 * ROWS_PER_UNIT
    assert [part.is_last for part in parts] == [False] * (num_ranks - 1) + [True]


@given(num_tokens=st.integers(1, 300_000), num_ranks=st.integers(2, 16))
def test_a_part_begins_at_a_whole_unit(num_tokens: int, num_ranks: int) -> None:
    for part in divide_vocabulary(num_tokens, num_ranks):
        assert part.tokens.start % ROWS_PER_UNIT == 0
