"""A cheaper form of the base proposes trees: a pass per level, over the base's own cache."""

from __future__ import annotations

from collections.abc import Sequence

from ..draft import Draft
from ..execution.runner import StepOutput
from ..model.inputs import SequenceChunk
from ..request import Request
from .growing_tree import GrowingTree, Level
from .proposer import DraftRequest
from .self_draft import SelfDraftProposer, drafted_chunk
from .tree_growth import LevelOutput, grow_trees


class SelfDraftTreeProposer(SelfDraftProposer):
    """Proposes trees for all requests at once. Verification writes over what it has written."""

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        requests = [request for request, _ in wanted]
        trees = [
            GrowingTree(request, num_tokens, drafted_chunk(request, [], 0))
            for request, num_tokens in wanted
        ]
        try:
            output = self._run(requests, list(map(_last_known, requests)))
            return grow_trees(trees, _level_output(output), self._compute_levels, self._give_up)
        except BaseException:
            for tree in trees:
                self._give_up(tree)
            raise

    def _compute_levels(self, levels: Sequence[Level]) -> LevelOutput:
        requests = [level.tree.request for level in levels]
        return _level_output(self._run(requests, [level.chunk for level in levels]))

    def _give_up(self, tree: GrowingTree) -> None:
        """See `_clear`."""
        start = len(tree.request.token_ids)
        self._runner.clear(tree.request, start, start + len(tree.written))


def _last_known(request: Request) -> SequenceChunk:
    return drafted_chunk(request, request.token_ids[-1:], -1)


def _level_output(output: StepOutput) -> LevelOutput:
    return LevelOutput(output.logits, output.finite)
