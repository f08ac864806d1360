"""A draft tree that grows level by level (Li et al. 2024, EAGLE-2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from math import inf
from typing import NamedTuple

from torch import Tensor

from ..draft import ROOT, Draft
from ..model.inputs import SequenceChunk
from ..request import Request
from .draft_tree import Candidates, branches


@dataclass(eq=False, slots=True)
class Node:
    """A draft token, or the last known token as the root."""

    token_id: int
    features: Tensor | None = None
    """`[hidden_size]`: what a head knows of the token before; None for a model."""
    parent: Node | None = None
    """None: the root."""
    cost: float = 0.0
    """The negated logarithm of the product of the probabilities from the root down."""

    @property
    def path(self) -> list[Node]:
        """From the root's child down to the node."""
        return [] if self.parent is None else [*self.parent.path, self]

    @property
    def token_ids(self) -> list[int]:
        """Of the path."""
        return [node.token_id for node in self.path]


class Level(NamedTuple):
    """What a pass computes of a tree."""

    tree: GrowingTree
    chunk: SequenceChunk
    """The logits of its last rows are kept, those of the frontier."""
    nodes: Sequence[Node]
    """Of the chunk's rows."""


class GrowingTree:
    """A request's draft while its levels are computed: the `num_tokens` likeliest nodes so far.

    A node is never more likely than its parent, so a node that has fallen out of these, and all
    after it, belong to no larger tree either. The result is therefore the `num_tokens` likeliest of
    all nodes.
    """

    def __init__(self, request: Request, num_tokens: int, behind: SequenceChunk) -> None:
        """`behind`: no tokens, behind the known ones, in blocks with room for `num_tokens - 1`."""
        self.request = request
        self.num_tokens = num_tokens
        self.frontier = [Node(request.token_ids[-1])]
        """The nodes of the last level whose children may belong to the tree and are not known."""
        self._behind = behind
        self._nodes: list[Node] = []
        """The likeliest first, so parents precede children."""
        self._written: list[Node] = []
        """Those whose keys and values lie behind the known tokens, in this order."""

    @property
    def written(self) -> Draft:
        """The tokens whose keys and values lie behind the known ones, in this order."""
        return _draft(self._written)

    def grow(self, found: Sequence[Candidates], states: Sequence[Tensor | None]) -> None:
        """Add a level: for each node of the frontier its children and their features."""
        children = [
            Node(token_id, state, parent, parent.cost - log_probability)
            for parent, candidates, state in zip(self.frontier, found, states, strict=True)
            for token_id, log_probability in zip(*candidates, strict=True)
            if log_probability > -inf  # also not NaN
        ]
        likeliest = sorted([*self._nodes, *children], key=lambda node: node.cost)
        self._nodes = likeliest[: self.num_tokens]
        # The children of the last node would come after it.
        new = set(children)
        self.frontier = [
            node
            for node in self._nodes[: self.num_tokens - 1]
            if node in new and node.token_id not in self.request.end_token_ids
        ]

    def next_level(self) -> Level:
        """The tokens to compute next, behind those that are written.

        These are the nodes of the frontier. Where they do not fit, the written nodes that are none
        of their ancestors give up their room, and so do all that are written after one of these.
        """
        levels = zip(*(node.path for node in self.frontier), strict=True)
        needed = dict.fromkeys(chain.from_iterable(levels))
        if len(self._written) + len(self.frontier) >= self.num_tokens:
            self._written = list(takewhile(needed.__contains__, self._written))
        held = set(self._written)
        nodes = [node for node in needed if node not in held]
        start = self._behind.start + len(self._written)
        self._written += nodes
        chunk = self._behind._replace(
            token_ids=[node.token_id for node in nodes],
            start=start,
            num_logits_rows=len(self.frontier),
            tree=_parents(self._written),
        )
        return Level(self, chunk, nodes)

    def draft(self) -> Draft:
        return _draft(self._nodes)


def _draft(nodes: Sequence[Node]) -> Draft:
    return Draft(tuple(node.token_id for node in nodes), _parents(nodes))


def _parents(nodes: Sequence[Node]) -> tuple[int, ...] | None:
    """See `Draft.parents`."""
    index: dict[Node | None, int] = {node: place for place, node in enumerate(nodes)}
    return branches(index.get(node.parent, ROOT) for node in nodes)
