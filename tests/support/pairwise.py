"""A small set of parameter combinations that covers every pair of values.

Most defects depend on one or two values (Kuhn, Wallace, Gallo 2004), and the number of combinations
that cover all pairs grows with the logarithm of the number of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from random import Random
from typing import Any

Row = dict[str, Any]
"""A value, which can be hashed, for each parameter."""
Pair = frozenset[tuple[str, Any]]

NUM_CANDIDATES = 20


def covering_rows(parameters: Mapping[str, Sequence[Any]], *, seed: int = 0) -> list[Row]:
    """Combinations that cover all pairs, the same for the same arguments.

    Greedy, as in AETG (Cohen et al. 1997): each row is the best of some that begin with a pair that
    is still missing and choose, parameter by parameter, the value that covers most.
    """
    rng = Random(seed)
    missing = dict.fromkeys(all_pairs(parameters))
    rows: list[Row] = []
    while missing:
        first = next(iter(missing))
        candidates = [_candidate(parameters, first, missing, rng) for _ in range(NUM_CANDIDATES)]
        best = max(candidates, key=lambda row: _num_covered(row, missing))
        for pair in pairs_of(best):
            missing.pop(pair, None)
        rows.append(best)
    return rows


def all_pairs(parameters: Mapping[str, Sequence[Any]]) -> list[Pair]:
    return [
        frozenset({(left, one), (right, other)})
        for left, right in combinations(parameters, 2)
        for one in parameters[left]
        for other in parameters[right]
    ]


def pairs_of(row: Row) -> list[Pair]:
    return [frozenset(pair) for pair in combinations(row.items(), 2)]


def _candidate(
    parameters: Mapping[str, Sequence[Any]], first: Pair, missing: Iterable[Pair], rng: Random
) -> Row:
    row: Row = dict(first)
    others = [name for name in parameters if name not in row]
    rng.shuffle(others)
    for name in others:
        values = rng.sample(parameters[name], len(parameters[name]))
        row[name] = max(
            values,
            key=lambda value: sum(
                frozenset({(name, value), entry}) in missing for entry in row.items()
            ),
        )
    return {name: row[name] for name in parameters}


def _num_covered(row: Row, missing: Iterable[Pair]) -> int:
    return sum(pair in missing for pair in pairs_of(row))
