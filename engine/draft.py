"""Draft tokens that follow a request's last token.

A draft is a tree of tokens, most often a chain. Its rows are computed in the same step as the last
token, each with its request's adapter. The acceptor follows the tree from the last token as long as
the draft tokens are correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the scheduler knows drafts, and runs without torch
    from torch import Tensor

ROOT = -1
"""The parent of a token that follows the last known one."""


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Draft tokens, parents before their children."""

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    """For each token the index of its parent among them, or ROOT; None: a chain."""
    probabilities: Tensor | None = None
    """fp32 `[len, vocab_size]`: the distribution from which each token was sampled. None: each is a
    point mass, because it was not sampled, or was sampled with the target's noise."""

    def __post_init__(self) -> None:
        parents = self.parents
        if parents is None:
            return
        is_tree = all(ROOT <= parent < index for index, parent in enumerate(parents))
        if not is_tree or len(parents) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens with the parents {parents}")

    def __len__(self) -> int:
        return len(self.token_ids)

    def parent(self, index: int) -> int:
        return index - 1 if self.parents is None else self.parents[index]

    def path(self, index: int) -> list[int]:
        """The indices from a child of the root down to `index`; empty for ROOT."""
        path: list[int] = []
        while index != ROOT:
            path.append(index)
            index = self.parent(index)
        return path[::-1]

    def child(self, parent: int, token_id: int) -> int | None:
        """The first child of `parent`, an index or ROOT, with this token."""
        if self.parents is None:
            index = parent + 1
            is_there = index < len(self.token_ids) and self.token_ids[index] == token_id
            return index if is_there else None
        for index in range(parent + 1, len(self.token_ids)):
            if self.parents[index] == parent and self.token_ids[index] == token_id:
                return index
        return None

    def matched(self, token_ids: Sequence[int]) -> list[int]:
        """The indices of the tokens from a child of the root down that these tokens begin with."""
        path: list[int] = []
        node = ROOT
        for token_id in token_ids:
            child = self.child(node, token_id)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def only(self, kept: Sequence[int]) -> Draft:
        """The draft without its other tokens; `kept` ascend and hold the parents of each."""
        if len(kept) == len(self.token_ids):
            return self
        place = {ROOT: ROOT} | {index: place for place, index in enumerate(kept)}
        return Draft(
            tuple(self.token_ids[index] for index in kept),
            None if self.parents is None else tuple(place[self.parents[index]] for index in kept),
            None if self.probabilities is None else self.probabilities[list(kept)],
        )


NO_DRAFT = Draft()
