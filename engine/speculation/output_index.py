"""Finds where the last tokens of a text occur in outputs, and what followed. Torch-free.

It answers as a suffix tree would (Oliaro et al., "SuffixDecoding", 2024): which positions follow
the longest match of the text's end. The contexts of all positions are kept in the order of their
tokens, read backwards from the position. So the positions with a common context are neighbours, and
the longest match is beside the place where the text's own end would be.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from .ngram_index import LONGEST

MAX_CANDIDATES = 64
"""Occurrences of the longest match that are considered."""
_TOKEN_BYTES = 4
_CONTEXT_BYTES = LONGEST * _TOKEN_BYTES
_START = bytes(_CONTEXT_BYTES)
"""Fills the contexts at the start of a text. Tokens are counted from 1, so it equals none."""
_ABOVE_ALL = b"\xff"
"""Above the first byte of all tokens and numbers."""


class Occurrences(NamedTuple):
    """Where the end of a text occurs in outputs."""

    length: int
    """Tokens before each position that equal the text's last ones; 0: there are no positions."""
    positions: Sequence[tuple[int, int]]
    """The output's number, and the index of the token in it that followed."""


NO_OCCURRENCES = Occurrences(0, ())


class OutputIndex:
    """An index of outputs, which only grows. A token takes some 120 bytes."""

    def __init__(self) -> None:
        self._outputs: list[array[int]] = []
        self._contexts: list[bytes] = []
        """Sorted. For each position its context, backwards, then the output's number and the index
        of the token."""
        self.num_tokens = 0

    def add(self, token_ids: Sequence[int], start: int) -> None:
        """Add an output: the tokens from `start` on. Those before it are context alone."""
        number, context_start = len(self._outputs), max(0, start - LONGEST)
        output, backwards = array("i", token_ids[start:]), _backwards(token_ids[context_start:])
        self._outputs.append(output)
        self.num_tokens += len(output)
        end = len(backwards) - _CONTEXT_BYTES
        for index in range(len(output)):
            begin = end - (start - context_start + index) * _TOKEN_BYTES
            context = backwards[begin : begin + _CONTEXT_BYTES]
            self._contexts.append(context + _as_bytes((number, index)))
        self._contexts.sort()  # linear: the sorted contexts so far and the new ones are merged

    def find(self, token_ids: Sequence[int]) -> Occurrences:
        """The occurrences of the longest match of the end of this text.

        If there are more than MAX_CANDIDATES, as many are taken at equal distances.
        """
        end = _backwards(token_ids[-LONGEST:])[:_CONTEXT_BYTES]
        place = bisect_left(self._contexts, end)
        beside = self._contexts[max(0, place - 1) : place + 1]
        most = min(LONGEST, len(token_ids))
        length = max((_match_len(end, context, most) for context in beside), default=0)
        if not length:
            return NO_OCCURRENCES
        match = end[: length * _TOKEN_BYTES]
        first = bisect_left(self._contexts, match)
        last = bisect_left(self._contexts, match + _ABOVE_ALL)
        distance = -(-(last - first) // MAX_CANDIDATES)
        return Occurrences(
            length, [_position(each) for each in self._contexts[first:last:distance]]
        )

    def continuation(self, position: tuple[int, int], num_tokens: int) -> array[int]:
        """At most `num_tokens` tokens of the output from this position on; at least one."""
        number, index = position
        return self._outputs[number][index : index + num_tokens]


def _backwards(token_ids: Sequence[int]) -> bytes:
    """The tokens from the last to the first, then the start of the text."""
    return _as_bytes([token + 1 for token in reversed(token_ids)]) + _START


def _as_bytes(numbers: Sequence[int]) -> bytes:
    """In the order of which bytes compare as the numbers do."""
    words = array("I", numbers)
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def _match_len(end: bytes, context: bytes, most: int) -> int:
    """The number of tokens, at most `most`, in which they are equal."""
    for length in range(most):
        here = slice(length * _TOKEN_BYTES, (length + 1) * _TOKEN_BYTES)
        if end[here] != context[here]:
            return length
    return most


def _position(context: bytes) -> tuple[int, int]:
    number, index = context[_CONTEXT_BYTES:-_TOKEN_BYTES], context[-_TOKEN_BYTES:]
    return int.from_bytes(number), int.from_bytes(index)
