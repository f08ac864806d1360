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

from ...adapters.leases import Lease
from ..config import EngineConfig
from ..draft import Draft
from ..execution.runner import ModelRunner, StepOutput
from ..model.base_model import BaseModel
from ..model.drafting_part import DraftingPart
from ..model.inputs import SequenceChunk
from ..model.layer_subset import EARLY_EXIT, SKIP, open_subset
from ..model.rounded_linears import RoundedLinears
from ..request import Request
from .drawing import DraftDrawing, GrowingChain, draw_next, make_drawing
from .proposer import DraftRequest


class SelfDraftProposer:
    needs_hidden_states = False

    def __init__(self, part: DraftingPart, runner: ModelRunner, drawing: DraftDrawing) -> None:
        self.name = part.name
        self._part = part
        self._runner = runner
        self._graphs = runner.graphs_within(part.name, part.only)
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
        requests = [chain.request for chain in chains]
        leases = [
            request.lease if len(request.token_ids) > request.adapter_start else None
            for request in requests
        ]
        output = self._run(list(map(_last_token, chains)), leases)
        finite = output.finite
        for chain, is_finite in zip(chains, finite, strict=True):
            if not is_finite:
                chain.num_tokens = len(chain.token_ids)
                self._clear(chain)
        sound = [index for index, is_finite in enumerate(finite) if is_finite]
        if sound:
            draw_next([chains[index] for index in sound], output.logits[sound], self._drawing)

    def _run(self, chunks: Sequence[SequenceChunk], leases: Sequence[Lease | None]) -> StepOutput:
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
    known = chain.request.token_ids
    last = (chain.token_ids or known)[-1]
    start = len(known) + len(chain.token_ids) - 1
    kv = chain.request.kv
    return SequenceChunk(
        [last],
        start=start,
        tables=kv.tables,
        num_evicted=kv.num_evicted,
        rotary_start=chain.request.namespace.rotary_start,
    )


def open_early_exit(
    _argument: str, config: EngineConfig, base: BaseModel, runner: ModelRunner
) -> SelfDraftProposer:
    """Raises InvalidParameter or UnsupportedModel."""
    part = open_subset(EARLY_EXIT, config, base)
    return SelfDraftProposer(part, runner, make_drawing(config.acceptance))


def open_skip(
    _argument: str, config: EngineConfig, base: BaseModel, runner: ModelRunner
) -> SelfDraftProposer:
    """Raises InvalidParameter or UnsupportedModel."""
    part = open_subset(SKIP, config, base)
    return SelfDraftProposer(part, runner, make_drawing(config.acceptance))


def open_quantized(
    _argument: str, config: EngineConfig, base: BaseModel, runner: ModelRunner
) -> SelfDraftProposer:
    """Its argument is read when the base is loaded."""
    part = RoundedLinears(base)
    return SelfDraftProposer(part, runner, make_drawing(config.acceptance))
