"""The nodes of a draft tree, compared with all possible trees."""

from __future__ import annotations

import random
from itertools import product
from math import inf, log

import pytest

from loraplex.engine.speculation.draft_tree import Candidates, best_first_tree


def random_levels(seed: int, num_levels: int, width: int) -> list[Candidates]:
    rng = random.Random(seed)
    levels = []
    for _ in range(num_levels):
        weights = sorted((rng.random() ** 3 for _ in range(width)), reverse=True)
        tokens = rng.sample(range(100), width)
        levels.append(Candidates(tokens, [log(weight / sum(weights)) for weight in weights]))
    return levels


@pytest.mark.parametrize("seed", range(5))
def test_takes_the_likeliest_of_all_nodes_in_their_order(seed: int) -> None:
    levels = random_levels(seed, num_levels=3, width=4)
    nodes = {
        tuple(levels[depth].token_ids[rank] for depth, rank in enumerate(ranks)): sum(
            levels[depth].log_probabilities[rank] for depth, rank in enumerate(ranks)
        )
        for length in (1, 2, 3)
        for ranks in product(range(4), repeat=length)
    }
    likeliest = sorted(nodes, key=lambda path: -nodes[path])[:20]
    draft = best_first_tree(levels, 20)
    paths = [
        tuple(draft.token_ids[node] for node in draft.path(index)) for index in range(len(draft))
    ]
    assert paths == likeliest


def test_ends_where_all_nodes_are_taken() -> None:
    assert len(best_first_tree(random_levels(0, num_levels=2, width=2), 50)) == 2 + 4


def test_certain_candidates_make_a_chain() -> None:
    levels = [Candidates([token, 9], [-1e-9, -20.0]) for token in (3, 1, 4)]
    draft = best_first_tree(levels, 3)
    assert (draft.token_ids, draft.parents) == ((3, 1, 4), None)


def test_what_is_impossible_is_not_drafted() -> None:
    levels = [Candidates([7, 8], [0.0, -inf])] * 2
    assert best_first_tree(levels, 8).token_ids == (7, 7)


def test_without_candidates_there_is_no_draft() -> None:
    assert len(best_first_tree([], 4)) == 0
