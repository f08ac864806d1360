"""The draft model proposes trees: a pass per level, over its own cache."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..draft import Draft
from ..execution.sampler import finite_rows
from ..model.inputs import SequenceChunk
from ..request import Request
from .draft_model import Drafting, DraftModelProposer, Piece
from .growing_tree import GrowingTree, Level
from .tree_growth import LevelOutput, grow_trees


class DraftModelTreeProposer(DraftModelProposer):
    """Proposes trees for all requests at once. Accepted tokens that it has computed are kept."""

    name = "draft_tree"

    def _propose(self, pieces: Sequence[Piece]) -> dict[Request, Draft]:
        """Compute these, then level after level of those that are complete."""
        if not pieces:
            return {}
        drafting, logits = self._compute(pieces)
        if not drafting:
            return {}
        trees = list(map(_tree_behind, drafting))
        drafts = grow_trees(trees, _level_output(logits), self._compute_levels, self._give_up)
        for entry, tree in zip(drafting, trees, strict=True):
            entry.sequence.hold(tree.written)
        return {entry.request: draft for entry, draft in zip(drafting, drafts, strict=True)}

    def _compute_levels(self, levels: Sequence[Level]) -> LevelOutput:
        return _level_output(self._run([level.chunk for level in levels]))

    def _give_up(self, tree: GrowingTree) -> None:
        self.forget(tree.request.request_id)


def _tree_behind(drafting: Drafting) -> GrowingTree:
    sequence = drafting.sequence
    behind = SequenceChunk(
        [],
        sequence.num_computed,
        sequence.tables,
        rotary_start=sequence.namespace.rotary_start,
    )
    return GrowingTree(drafting.request, drafting.chain.num_tokens, behind)


def _level_output(logits: Tensor) -> LevelOutput:
    return LevelOutput(logits, finite_rows(logits).tolist())
