"""Self-speculation: a cheaper form of the base proposes tokens, with the request's own adapter.

`early_exit`: its first layers with its norm and head (LayerSkip, Elhoushi et al. 2024). `skip`:
all but a set of layers that was chosen by measurement (Draft & Verify, Zhang et al. 2024; SWIFT,
Xia et al. 2025). `quantized`: all layers with rounded weights (QuantSpec, Tiwari et al. 2025, which
rounds the KV cache too). None has a cache of its own: a draft token writes its keys and values
where verification writes those of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..draft import Draft
from ..execution.runner import ModelRunner, StepOutput
from ..model.drafting_part import DraftingPart
from ..model.inputs import SequenceChunk
from ..request import Request
from .drawing import DraftDrawing, GrowingChain, draw_next
from .proposer import DraftRequest


class SelfDraftProposer:
    needs_hidden_states = False

    def __init__(
        self, name: str, part: DraftingPart, runner: ModelRunner, drawing: DraftDrawing
    ) -> None:
        self.name = name
        self._part = part
        self._runner = runner
        self._graphs = runner.graphs_within(name, part.only)
        self._drawing = drawing

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        chains = [GrowingChain(request, num_tokens) for request, num_tokens in wanted]
        try:
            while growing := [chain for chain in chains if chain.wants_more]:
                self._grow(growing)
        except BaseException:
            for chain in chains:
                self._clear(chain)
            raise
        return [chain.draft() for chain in chains]

    def observe(self, request: Request, hidden_state: Tensor | None) -> None:
        """The cache that it shares is the target's."""

    def forget(self, request_id: str) -> None:
        """It keeps nothing per request."""

    def _grow(self, chains: Sequence[GrowingChain]) -> None:
        """Give each of them one token more; a result that is not finite ends it."""
        output = self._run([chain.request for chain in chains], list(map(_last_token, chains)))
        finite = output.finite
        for chain, is_finite in zip(chains, finite, strict=True):
            if not is_finite:
                chain.num_tokens = len(chain.token_ids)
                self._clear(chain)
        sound = [index for index, is_finite in enumerate(finite) if is_finite]
        if sound:
            draw_next([chains[index] for index in sound], output.logits[sound], self._drawing)

    def _run(self, requests: Sequence[Request], chunks: Sequence[SequenceChunk]) -> StepOutput:
        """Compute a chunk of each of these requests."""
        leases = [
            request.lease if len(request.token_ids) > request.adapter_start else None
            for request in requests
        ]
        if self._graphs:
            output = self._runner.replay(self._graphs, chunks, leases)
            if output is not None:
                return output
        return self._runner.run_drafting(self._part, chunks, leases)

    def _clear(self, chain: GrowingChain) -> None:
        """Leave nothing of the drafted positions, should no verification write them again."""
        start = len(chain.request.token_ids)
        self._runner.clear(chain.request, start, start + len(chain.token_ids))


def _last_token(chain: GrowingChain) -> SequenceChunk:
    """Known or drafted."""
    last = (chain.token_ids or chain.request.token_ids)[-1]
    return drafted_chunk(chain.request, [last], len(chain.token_ids) - 1)


def drafted_chunk(request: Request, token_ids: Sequence[int], offset: int) -> SequenceChunk:
    """Tokens that begin `offset` places after the known ones, in the base's cache."""
    return SequenceChunk(
        token_ids,
        start=len(request.token_ids) + offset,
        tables=request.kv.tables,
        num_evicted=request.kv.num_evicted,
        rotary_start=request.namespace.rotary_start,
    )
