"""A draft tree that grows level by level (Li et al. 2024, EAGLE-2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from math import inf

from torch import Tensor

from ..draft import ROOT, Draft
from ..model.inputs import SequenceChunk
from ..request import Request
from .draft_cache import CachedSequence
from .draft_tree import Candidates, branches


@dataclass(eq=False, slots=True)
class Node:
    """A draft token, or the last known token as the root."""

    token_id: int
    features: Tensor
    """`[hidden_size]`: what the head knows of the token before."""
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


class GrowingTree:
    """A request's draft while its levels are computed: the `num_tokens` likeliest nodes so far.

    A node is never more likely than its parent, so a node that has fallen out of these, and all
    after it, belong to no larger tree either. The result is therefore the `num_tokens` likeliest of
    all nodes.
    """

    def __init__(
        self, request: Request, num_tokens: int, sequence: CachedSequence, features: Tensor
    ) -> None:
        """`sequence`: the request's part of the head's cache, which holds its known tokens and has
        room for `num_tokens - 1` more. `features [hidden_size]`: of the last known token."""
        self.request = request
        self.num_tokens = num_tokens
        self.frontier = [Node(request.token_ids[-1], features)]
        """The nodes of the last level whose children may belong to the tree and are not known."""
        self._sequence = sequence
        self._nodes: list[Node] = []
        """The likeliest first, so parents precede children."""
        self._written: list[Node] = []
        """Those whose keys and values lie behind the known tokens."""

    def grow(self, found: Sequence[Candidates], states: Sequence[Tensor]) -> None:
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

    def next_level(self) -> tuple[SequenceChunk, list[Node]]:
        """The tokens to compute next, laid out behind the known ones, and their nodes.

        The frontier's come last; its logits are kept. Its ancestors come before it, because every
        level uses the same slots. Those that all of the frontier share are left out if their
        slots still hold them.
        """
        levels = list(zip(*(node.path for node in self.frontier), strict=True))
        kept = [
            node
            for node, _ in takewhile(
                lambda pair: {pair[0]} == set(pair[1]), zip(self._written, levels, strict=False)
            )
        ]
        rows = list(dict.fromkeys(chain.from_iterable(levels[len(kept) :])))
        self._written = kept + rows
        chunk = SequenceChunk(
            [node.token_id for node in rows],
            self._sequence.num_computed + len(kept),
            self._sequence.tables,
            num_logits_rows=len(self.frontier),
            tree=_parents(rows),
        )
        return chunk, rows

    def draft(self) -> Draft:
        return Draft(tuple(node.token_id for node in self._nodes), _parents(self._nodes))


def _parents(nodes: Sequence[Node]) -> tuple[int, ...] | None:
    """See `Draft.parents`; parents that are not among the nodes are the root."""
    index = {node: place for place, node in enumerate(nodes)}
    return branches(ROOT if node.parent is None else index.get(node.parent, ROOT) for node in nodes)
