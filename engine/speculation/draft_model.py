"""A proposer with a second, smaller model (Leviathan et al. 2023; Chen et al. 2023).

The draft model is loaded and run like the base model, with its own paged cache, but without
adapters. Verification keeps the output that of the request's adapter. An adapter whose output
differs much from the base's only has a lower acceptance rate.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import EngineConfig
from ..draft import NO_DRAFT, Draft
from ..kv.cache import KvCache
from ..kv.groups import one_group
from ..model.base_model import BaseModel
from ..model.forward import PagedForward, run_model
from ..model.inputs import SequenceChunk, make_inputs
from ..request import Request
from .draft_cache import CachedSequence, DraftCache
from .drawing import DraftDrawing, GrowingChain, draw_next, make_drawing
from .fair_shares import fair_shares
from .proposer import DraftRequest

MAX_CATCH_UP_TOKENS = 256
"""The maximum number of known tokens, over all requests, that a step's drafting computes: the draft
model catches up on a long prompt over several steps, and drafts once it is done."""
LEAST_SHARE = 2
"""The number of known tokens that every request may compute in any case: the last draft token, if
all were accepted, and the token that was sampled after it."""


@dataclass(eq=False)
class _Drafting:
    """A request for which tokens are being drafted."""

    chain: GrowingChain
    sequence: CachedSequence

    @property
    def request(self) -> Request:
        return self.chain.request

    @property
    def num_missing(self) -> int:
        """Tokens to compute before the next can be drafted."""
        num_tokens = len(self.request.token_ids) + len(self.chain.token_ids)
        return num_tokens - self.sequence.num_computed

    def next_tokens(self, count: int) -> list[int]:
        """The first that are missing: known ones, or once those are computed, draft tokens."""
        known, start = self.request.token_ids, self.sequence.num_computed
        first_drafted = start - len(known)
        if first_drafted < 0:
            return known[start : start + count]
        return self.chain.token_ids[first_drafted : first_drafted + count]

    def draft(self) -> Draft:
        """The draft; the sequence learns which of its tokens are draft tokens."""
        num_draft_tokens = max(0, self.sequence.num_computed - len(self.request.token_ids))
        self.sequence.draft_tokens = self.chain.token_ids[:num_draft_tokens]
        return self.chain.draft()


class _Piece(NamedTuple):
    """The tokens of a request that one forward pass computes."""

    drafting: _Drafting
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether it reaches the last token, so that the next is drafted."""
        return self.num_tokens == self.drafting.num_missing

    def span(self) -> SequenceChunk:
        sequence = self.drafting.sequence
        return SequenceChunk(
            token_ids=self.drafting.next_tokens(self.num_tokens),
            start=sequence.num_computed,
            tables=sequence.tables,
            num_kept_rows=int(self.is_last),
        )


class DraftModelProposer:
    """Drafts for all requests at once: one forward pass per token, over the unfinished requests."""

    name = "draft"
    needs_hidden_states = False

    def __init__(
        self,
        model: BaseModel,
        *,
        num_blocks: int,
        block_size: int,
        drawing: DraftDrawing,
        ends: Callable[[Request, int], bool],
        prefix_secret: bytes | None = None,
    ) -> None:
        """`num_blocks`: of its cache. `ends`: whether a token ends a request's output; nothing is
        drafted after it. `prefix_secret`: see `DraftCache`."""
        (group,) = one_group(len(model.kv_shapes), num_blocks + 1)
        self.cache = DraftCache(group, block_size, prefix_secret=prefix_secret)
        self._model = model
        self._drawing = drawing
        self._ends = ends
        self._pages = KvCache(
            [group],
            model.kv_shapes,
            block_size=block_size,
            kv_format=model.kv_format,
            device=model.device,
        )

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        try:
            drafting = self._begin(wanted)
            self._propose(self._first_pieces(list(drafting.values())))
            return [
                drafting[request].draft() if request in drafting else NO_DRAFT
                for request, _ in wanted
            ]
        except BaseException:
            # Partially computed tokens are unknown to the cache.
            self._model.forget_step()
            for request, _ in wanted:
                self.forget(request.request_id)
            raise

    def observe(self, request: Request, hidden_state: Tensor | None) -> None:
        """The next call compares its draft tokens with the request's actual tokens."""

    def forget(self, request_id: str) -> None:
        self.cache.drop(request_id)

    def _begin(self, wanted: Sequence[DraftRequest]) -> dict[Request, _Drafting]:
        """The requests that the model supports: no longer than its maximum length, or than its
        cache."""
        drafting = {}
        for request, num_tokens in reversed(wanted):  # the first is evicted last
            num_known = len(request.token_ids)
            num_tokens = min(num_tokens, self._model.max_model_len + 1 - num_known)
            if num_tokens < 1 or not self.cache.can_hold(num_known + num_tokens - 1):
                self.forget(request.request_id)
                continue
            chain = GrowingChain(request, num_tokens)
            drafting[request] = _Drafting(chain, self.cache.settle(request))
        return dict(reversed(drafting.items()))

    def _first_pieces(self, drafting: Sequence[_Drafting]) -> list[_Piece]:
        """The known tokens that each may compute, as far as there is room."""
        budget = max(MAX_CATCH_UP_TOKENS, LEAST_SHARE * len(drafting))
        shares = fair_shares([entry.num_missing for entry in drafting], budget)
        pieces: list[_Piece] = []
        keep: set[str] = set()
        for entry, share in zip(drafting, shares, strict=True):
            piece = _Piece(entry, share)
            request_id = entry.request.request_id
            num_tokens = share + entry.chain.num_tokens - 1 if piece.is_last else share
            if request_id in self.cache and self.cache.reserve(request_id, num_tokens, keep):
                keep.add(request_id)
                pieces.append(piece)
        self._pages.execute(self.cache.take_operations())
        return pieces

    def _propose(self, pieces: list[_Piece]) -> None:
        """Compute these, propose after those that are complete, and so on."""
        while pieces:
            pieces.sort(key=lambda piece: (piece.num_tokens, piece.drafting.sequence.num_computed))
            logits = self._run([piece.span() for piece in pieces])
            complete = [piece.drafting for piece in pieces if piece.is_last]
            for entry, num_tokens in pieces:
                self.cache.advance(entry.request, num_tokens)
            pieces = [_Piece(entry, 1) for entry in self._draw(complete, logits)]

    def _draw(self, drafting: Sequence[_Drafting], logits: Tensor) -> list[_Drafting]:
        """Draft a token for each by its row of logits; return those that need another token.

        A request with non-finite logits is evicted, because its cache must not be used.
        """
        finite = logits.isfinite().all(-1).tolist()
        for entry, is_finite in zip(drafting, finite, strict=True):
            if not is_finite:
                self.forget(entry.request.request_id)
        drafting = [entry for entry, is_finite in zip(drafting, finite, strict=True) if is_finite]
        if not drafting:
            return []
        chains = [entry.chain for entry in drafting]
        draw_next(chains, logits if all(finite) else logits[finite], self._drawing)
        return [entry for entry in drafting if self._goes_on(entry.chain)]

    def _goes_on(self, chain: GrowingChain) -> bool:
        return chain.wants_more and not self._ends(chain.request, chain.token_ids[-1])

    def _run(self, spans: Sequence[SequenceChunk]) -> Tensor:
        """fp32 logits of the kept rows."""
        device = self._model.device
        inputs = make_inputs(
            spans, groups=self._pages.groups, block_size=self._pages.block_size, device=device
        )
        rows = torch.tensor(inputs.logits_rows, dtype=torch.int64).to(device)
        forward = PagedForward(self._pages, inputs.attention)
        return run_model(self._model.model, forward, inputs.input_ids, inputs.positions, rows)


def open_draft_model(
    config: EngineConfig, base: BaseModel, draft: BaseModel | None, num_blocks: int
) -> DraftModelProposer | None:
    """A proposer with the model `draft`, if there is one, for `base`, with `num_blocks` blocks of
    cache."""
    if draft is None:
        return None
    return DraftModelProposer(
        draft,
        num_blocks=num_blocks,
        block_size=config.kv_block_size,
        drawing=make_drawing(config.acceptance),
        ends=lambda request, token: request.is_ended_by(token, base.eos_token_ids),
        prefix_secret=secrets.token_bytes(32) if config.prefix_caching else None,
    )
