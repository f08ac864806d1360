"""Scores of answers against expected ones, from 0 to 1."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec
import numpy as np


def exact(answer: str, expected: str) -> float:
    """1 if the texts are equal without whitespace around them."""
    return float(answer.strip() == expected.strip())


def equal_json(answer: str, expected: Any) -> float:
    """1 if the answer is JSON that equals the expected value. The order of keys does not count; 1
    and 1.0 are equal, 1 and true are not."""
    try:
        return float(_is_equal(msgspec.json.decode(answer), expected))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return 0.0


def rouge_l(answer: str, expected: str) -> float:
    """F1 of the longest common subsequence of words (Lin, 2004). Words are runs of letters and
    digits, without case. Two texts without words are equal."""
    words, expected_words = _words(answer), _words(expected)
    if not words and not expected_words:
        return 1.0
    return 2 * _common_length(words, expected_words) / (len(words) + len(expected_words))


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine of two vectors; 0 if it is negative or a vector is zero."""
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return min(max(float(a @ b) / lengths, 0.0), 1.0) if lengths else 0.0


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return bool(one == other)


def _words(text: str) -> list[str]:
    runs = groupby(text.casefold(), key=str.isalnum)
    return ["".join(run) for is_word, run in runs if is_word]


def _common_length(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest common subsequence. The rows of the usual table are the bits of an
    integer (Hyyrö, 2004), so texts of thousands of words take milliseconds."""
    places: dict[str, int] = {}
    for at, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << at
    every = (1 << len(one)) - 1
    row = every
    for word in other:
        matched = row & places.get(word, 0)
        row = ((row + matched) | (row - matched)) & every
    return (row ^ every).bit_count()
