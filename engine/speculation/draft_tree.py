"""Builds a small tree of the draft tokens that are most worth verifying."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from ..draft import ROOT, Draft


class Candidates(NamedTuple):
    """The candidates at one depth, independent of the nodes above: most likely first."""

    token_ids: Sequence[int]
    log_probabilities: Sequence[float]


def best_first_tree(levels: Sequence[Candidates], num_tokens: int) -> Draft:
    """The `num_tokens` nodes with the largest products of probabilities from the root down.

    `levels`: the candidates for each depth; each node's children are all candidates of the next
    depth. Nodes are in descending order of probability, so parents precede children; impossible
    nodes are omitted. A tree without branches is returned as a chain.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    # Negated log-probability; parent, depth and rank decide between equals.
    heap: list[tuple[float, int, int, int]] = []

    def offer(parent_cost: float, parent: int, depth: int, rank: int) -> None:
        if depth == len(levels) or rank == len(levels[depth].token_ids):
            return
        cost = parent_cost - levels[depth].log_probabilities[rank]
        if cost < inf:
            heappush(heap, (cost, parent, depth, rank))

    offer(0.0, ROOT, 0, 0)
    while heap and len(token_ids) < num_tokens:
        cost, parent, depth, rank = heappop(heap)
        level = levels[depth]
        parents.append(parent)
        token_ids.append(level.token_ids[rank])
        offer(cost + level.log_probabilities[rank], parent, depth, rank + 1)
        offer(cost, len(token_ids) - 1, depth + 1, 0)
    return Draft(tuple(token_ids), branches(parents))


def branches(parents: Iterable[int]) -> tuple[int, ...] | None:
    """The parents of a draft's tokens, as `Draft.parents` has them: None for a chain."""
    given = tuple(parents)
    return None if given == tuple(range(ROOT, len(given) - 1)) else given
