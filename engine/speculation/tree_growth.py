"""Grows trees of several requests together: a pass of their proposer per level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from ..draft import Draft
from ..execution.grammar_masks import restrict_drafts
from ..execution.sampler import row_after
from .draft_head import DraftHead
from .draft_tree import Candidates
from .drawing import log_beliefs, takes_largest
from .growing_tree import GrowingTree, Level


class LevelOutput(NamedTuple):
    """What a pass gives for the nodes of its trees' frontiers, those of each tree adjacent."""

    logits: Tensor
    """fp32 `[num_nodes, vocab_size]`."""
    finite: Sequence[bool]
    """For each node whether all of its logits are numbers."""
    states: Tensor | None = None
    """`[num_nodes, hidden_size]`: the features of the children; None for a model."""


def grow_trees(
    trees: Sequence[GrowingTree],
    output: LevelOutput,
    compute: Callable[[Sequence[Level]], LevelOutput],
    give_up: Callable[[GrowingTree], None],
    head: DraftHead | None = None,
) -> list[Draft]:
    """The trees' drafts, once no level may have likelier nodes.

    `output`: of the known tokens. `compute`: a pass over these levels, the shortest first.
    `give_up`: called for a tree whose logits are not finite: what is written of it must not be
    used, and it ends with the nodes that it has. `head`: whose vocabulary the logits have; None:
    the whole one.
    """
    growing = list(trees)
    while growing:
        _add_level(growing, output, give_up, head)
        if growing := [tree for tree in growing if tree.frontier]:
            levels = [tree.next_level() for tree in growing]
            levels.sort(key=lambda level: len(level.nodes))
            growing = [level.tree for level in levels]
            output = compute(levels)
    return [tree.draft() for tree in trees]


def _add_level(
    trees: Sequence[GrowingTree],
    output: LevelOutput,
    give_up: Callable[[GrowingTree], None],
    head: DraftHead | None,
) -> None:
    logits, finite, states = output
    candidates = _candidates(trees, logits, head)
    features = [None] * len(logits) if states is None else list(states)
    start = 0
    for tree in trees:
        own = slice(start, start := start + len(tree.frontier))
        if all(finite[own]):
            tree.grow(candidates[own], features[own])
        else:
            tree.frontier = []
            give_up(tree)


def _candidates(
    trees: Sequence[GrowingTree], logits: Tensor, head: DraftHead | None
) -> list[Candidates]:
    """After each node of the frontiers the tokens most likely to be the target's own sample."""
    width = max(tree.num_tokens for tree in trees)
    if all(takes_largest(tree.request) for tree in trees):
        found = logits.log_softmax(-1).topk(min(width, logits.shape[-1]))
        token_ids = found.indices if head is None else head.token_ids[found.indices]
    else:
        requests = [tree.request for tree in trees for _ in tree.frontier]
        paths = [node.token_ids for tree in trees for node in tree.frontier]
        whole = logits if head is None else head.whole_logits(logits)
        allowed = restrict_drafts(requests, paths, whole)
        found = log_beliefs(allowed, list(map(row_after, requests, paths))).topk(
            min(width, whole.shape[-1])
        )
        token_ids = found.indices
    pairs = zip(token_ids.tolist(), found.values.tolist(), strict=True)
    return [Candidates(*pair) for pair in pairs]
