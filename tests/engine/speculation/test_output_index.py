"""The index of outputs finds all occurrences of the longest match, as a search of all places."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.speculation.ngram_index import LONGEST
from loraplex.engine.speculation.output_index import MAX_CANDIDATES, OutputIndex

Output = tuple[list[int], list[int]]
"""The tokens before an output, and its own."""


def index_of(outputs: list[Output]) -> OutputIndex:
    index = OutputIndex()
    for context, output in outputs:
        index.add(context + output, len(context))
    return index


def searched(outputs: list[Output], text: list[int]) -> tuple[int, set[tuple[int, int]]]:
    """The length of the longest match and its places, found by trying all of them."""
    found: dict[int, set[tuple[int, int]]] = {}
    for number, (context, output) in enumerate(outputs):
        known = context[-LONGEST:] + output
        for place in range(len(known) - len(output), len(known)):
            length = 0
            while (
                length < min(LONGEST, place, len(text))
                and known[place - length - 1] == text[-length - 1]
            ):
                length += 1
            index = place - len(known) + len(output)
            found.setdefault(length, set()).add((number, index))
    longest = max(found, default=0)
    return longest, found[longest] if longest else set()


tokens = st.lists(st.integers(0, 2), max_size=30)


@given(outputs=st.lists(st.tuples(tokens, tokens), max_size=4), text=tokens)
def test_it_finds_what_a_search_of_all_places_finds(outputs: list[Output], text: list[int]) -> None:
    length, positions = index_of(outputs).find(text)
    expected_length, expected = searched(outputs, text)
    assert length == expected_length
    assert set(positions) <= expected
    assert len(set(positions)) == len(positions)
    assert len(expected) > MAX_CANDIDATES or set(positions) == expected


@pytest.mark.parametrize("token", [0, 255, 256, 65_535, 65_536, 2**31 - 2])
def test_tokens_of_any_size_are_found(token: int) -> None:
    index = index_of([([], [7, token, token + 1, 9]), ([], [token])])
    assert index.find([token]) == (1, [(0, 2)])
    assert index.find([5, token, token + 1]) == (2, [(0, 3)])
    assert index.find([3]).length == 0
    assert list(index.continuation((0, 1), 9)) == [token, token + 1, 9]


def test_nothing_matches_beyond_the_start_of_a_text() -> None:
    index = index_of([([], [0, 0, 1])])
    assert index.find([]).positions == ()
    assert index.find([0]) == (1, [(0, 1), (0, 2)])
    assert index.find([0, 0, 0]) == (2, [(0, 2)])
    assert index.find([5, 0]) == (1, [(0, 1), (0, 2)])


def test_the_tokens_before_an_output_are_context_and_never_drafted() -> None:
    index = index_of([([4, 5, 6], [7, 8])])
    assert index.num_tokens == 2
    assert index.find([4, 5]).length == 0
    assert index.find([4, 5, 6]) == (3, [(0, 0)])
    assert list(index.continuation((0, 0), 9)) == [7, 8]


def test_a_match_is_no_longer_than_the_maximum() -> None:
    text = list(range(3 * LONGEST))
    index = index_of([([], [*text, 1]), ([], [*range(100, 120), *text[-LONGEST:], 2])])
    assert index.find(text) == (LONGEST, [(0, len(text)), (1, 20 + LONGEST)])


def test_of_many_occurrences_a_bounded_number_spread_over_all_outputs_is_taken() -> None:
    num_outputs = 10 * MAX_CANDIDATES + 3
    text = list(range(LONGEST))
    index = index_of([([], [*text, number]) for number in range(num_outputs)])
    length, positions = index.find(text)
    numbers = [number for number, _ in positions]
    assert length == LONGEST
    assert len(numbers) <= MAX_CANDIDATES
    assert numbers == sorted(numbers)
    gaps = [after - before for before, after in pairwise(numbers)]
    assert max(gaps) <= num_outputs / MAX_CANDIDATES + 1
    assert numbers[-1] >= num_outputs - max(gaps)
