"""Index of earlier occurrences of the last tokens in a growing text. Torch-free.

Positions that follow the same two tokens are chained, the latest first, as compressors find their
matches (Deutsch, RFC 1951, section 4): another token costs one entry, a search a bounded walk.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

LONGEST = 16
"""The maximum length of a match: a longer one is not better."""
MAX_CANDIDATES = 16
"""Occurrences of the last two tokens that a search compares."""
_PAIR = 2
_NONE = -1


class Match(NamedTuple):
    position: int
    """The position of the token that followed."""
    length: int
    """Tokens before it that equal the text's last ones."""


class NgramIndex:
    """An index of a list of tokens that only grows at its end."""

    def __init__(self, token_ids: Sequence[int], *, start: int = 0) -> None:
        """Tokens before `start` are left out."""
        self.start = start
        self._token_ids = token_ids
        self._first = start + _PAIR
        self._behind_token: dict[int, int] = {}
        self._behind_pair: dict[tuple[int, int], int] = {}
        """The latest position after each pair."""
        self._earlier = array("i")
        """For each position from `_first` on, the previous position after the same two tokens."""

    def __len__(self) -> int:
        """Tokens that are indexed."""
        return len(self._earlier)

    @property
    def num_unread(self) -> int:
        """Tokens that `extend` would still read: the last is left for later, nothing follows it."""
        return max(0, len(self._token_ids) - self._first - len(self._earlier))

    def extend(self, limit: int) -> int:
        """Read at most `limit` more tokens; returns how many were read."""
        tokens, latest = self._token_ids, self._behind_pair
        begin = self._first + len(self._earlier)
        end = min(len(tokens), begin + limit)
        for position in range(begin, end):
            pair = tokens[position - 2], tokens[position - 1]
            self._earlier.append(latest.get(pair, _NONE))
            latest[pair] = self._behind_token[pair[1]] = position
        return max(0, end - begin)

    def find(self) -> Match | None:
        """The longest match of the end of the text, the latest of equally long ones.

        Considers the indexed tokens: the latest MAX_CANDIDATES occurrences of the last two tokens
        or, if there are none, the latest of the last token.
        """
        tokens = self._token_ids
        if len(tokens) < _PAIR:
            return None
        position = self._behind_pair.get((tokens[-2], tokens[-1]), _NONE)
        if position == _NONE:
            position = self._behind_token.get(tokens[-1], _NONE)
            return None if position == _NONE else Match(position, 1)
        return self._longest(position)

    def _longest(self, position: int) -> Match:
        best = Match(position, self._match_len(position))
        for _ in range(MAX_CANDIDATES - 1):
            position = self._earlier[position - self._first]
            if position == _NONE or best.length == LONGEST:
                break
            length = self._match_len(position)
            if length > best.length:
                best = Match(position, length)
        return best

    def _match_len(self, position: int) -> int:
        """The number of tokens before `position` that equal the last ones of the text, at least
        two."""
        tokens, end = self._token_ids, len(self._token_ids)
        length, most = _PAIR, min(LONGEST, position)
        while length < most and tokens[position - length - 1] == tokens[end - length - 1]:
            length += 1
        return length
