"""A tree that grows by levels: what each pass sees of it, and which nodes it ends with."""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import nlargest
from math import exp, log, prod

import pytest

from loraplex.engine.draft import Draft
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.model.inputs import SequenceChunk
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.speculation.draft_tree import Candidates
from loraplex.engine.speculation.growing_tree import GrowingTree, Level

KNOWN = [7, 8, 9]
VOCAB_SIZE = 5
NodePath = tuple[int, ...]
Distribution = Callable[[NodePath], list[float]]


def make_tree(num_tokens: int, *end_token_ids: int) -> GrowingTree:
    params = SamplingParams(stop_token_ids=end_token_ids)
    submitted = GenerationRequest("r", "acme", KNOWN, params)
    namespace = CacheNamespace("acme", "runtime", None)
    request = Request(submitted, namespace, seed=0, arrival_time=0.0, adapter_tier=None)
    request.end_token_ids = frozenset(end_token_ids)
    return GrowingTree(request, num_tokens, SequenceChunk([], len(KNOWN), [], rotary_start=3))


def random_distribution(seed: int, sharpness: float) -> Distribution:
    """The probabilities of the tokens after any path."""

    def after(path: NodePath) -> list[float]:
        rng = random.Random(f"{seed} {path}")
        weights = [exp(sharpness * rng.random()) for _ in range(VOCAB_SIZE)]
        return [weight / sum(weights) for weight in weights]

    return after


def likeliest(after: Distribution, num_tokens: int) -> list[float]:
    """The largest probabilities of all nodes. One that so many of its level surpass is left out."""
    found: list[float] = []
    level: list[tuple[float, NodePath]] = [(1.0, ())]
    for _ in range(num_tokens):
        children = [
            (above * chance, (*path, token))
            for above, path in level
            for token, chance in enumerate(after(path))
        ]
        level = nlargest(num_tokens, children)
        found += [chance for chance, _ in level]
    return nlargest(num_tokens, found)


def chance_of(after: Distribution, path: NodePath) -> float:
    return prod(after(path[:end])[token] for end, token in enumerate(path))


def paths_of(draft: Draft) -> list[NodePath]:
    return [
        tuple(draft.token_ids[place] for place in draft.path(index)) for index in range(len(draft))
    ]


class Cache:
    """The slots behind the known tokens: each has the path of its token."""

    def __init__(self, size: int) -> None:
        self.slots: list[NodePath | None] = [None] * size

    def write(self, level: Level) -> None:
        """Each row sees its own path, and no other token of the tree."""
        chunk = level.chunk
        first = chunk.start - len(KNOWN)
        assert first + len(chunk.token_ids) <= len(self.slots)
        words = chunk.hidden
        for row, (node, token) in enumerate(zip(level.nodes, chunk.token_ids, strict=True)):
            self.slots[first + row] = tuple(node.token_ids)
            assert token == node.token_id
        for row, (node, word) in enumerate(zip(level.nodes, words, strict=True)):
            place = first + row
            seen = [self.slots[place - back] for back in range(place + 1) if not word >> back & 1]
            path = node.token_ids
            assert seen[::-1] == [tuple(path[: end + 1]) for end in range(len(path))]


def grown(tree: GrowingTree, after: Distribution) -> tuple[Cache, list[Level]]:
    cache, levels = Cache(tree.num_tokens - 1), []
    while tree.frontier:
        found = []
        for node in tree.frontier:
            pairs = sorted(
                ((log(chance), token) for token, chance in enumerate(after(tuple(node.token_ids)))),
                reverse=True,
            )
            found.append(Candidates([token for _, token in pairs], [cost for cost, _ in pairs]))
        tree.grow(found, [None] * len(found))
        if tree.frontier:
            levels.append(tree.next_level())
            cache.write(levels[-1])
    return cache, levels


@pytest.mark.parametrize("sharpness", [0.5, 3.0, 9.0])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 6, 12])
def test_each_pass_sees_the_paths_of_its_nodes_and_the_likeliest_are_found(
    num_tokens: int, sharpness: float
) -> None:
    for seed in range(8):
        after = random_distribution(seed, sharpness)
        tree = make_tree(num_tokens)
        cache, levels = grown(tree, after)
        paths = paths_of(tree.draft())
        assert len(set(paths)) == num_tokens
        chances = [chance_of(after, path) for path in paths]
        assert chances == pytest.approx(likeliest(after, num_tokens))
        assert len(levels) < num_tokens
        held = paths_of(tree.written)
        assert held == cache.slots[: len(held)]


def test_a_certain_tree_is_a_chain_of_one_row_a_pass() -> None:
    tree = make_tree(6)
    _, levels = grown(tree, lambda path: [0.999, *[0.00025] * 4])
    assert [len(level.nodes) for level in levels[-3:]] == [1, 1, 1]
    assert tree.draft().parents is None
    assert levels[-1].chunk.tree is None


def test_a_node_is_computed_once_while_there_is_room() -> None:
    tree = make_tree(8)
    _, levels = grown(tree, random_distribution(0, 2.0))
    computed = [node for level in levels for node in level.nodes]
    assert len(levels) > 1
    assert len(set(computed[:7])) == 7


def test_nothing_is_computed_behind_a_token_that_ends_the_output() -> None:
    tree = make_tree(8, 0)
    _, levels = grown(tree, lambda path: [0.6, 0.3, 0.05, 0.03, 0.02])
    assert 0 in tree.draft().token_ids
    assert all(0 not in level.chunk.token_ids for level in levels)


def test_levels_lie_as_the_known_tokens_do() -> None:
    tree = make_tree(3)
    _, levels = grown(tree, random_distribution(1, 3.0))
    assert all(level.chunk.rotary_start == 3 for level in levels)
    for depth, level in enumerate(levels, 1):
        deepest = [node for node in level.nodes if len(node.path) == depth]
        assert level.chunk.num_logits_rows == len(deepest)
