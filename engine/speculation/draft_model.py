"""A second, smaller model proposes (Leviathan et al. 2023; Chen et al. 2023).

It is loaded and computed as the base model is, with a separate paged cache, but without adapters:
whatever a draft token was made by, the verifier keeps the output that of the request's own adapter.
An adapter that takes the answers far from the base's only has fewer draft tokens accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..checkpoint.files import DRAFT
from ..draft import NO_DRAFT, Draft
from ..execution.decode_graphs import DecodeGraphs
from ..execution.sampler import finite_rows
from ..kv.cache import KvCache
from ..model.base_model import BaseModel
from ..model.forward import PagedForward, run_model
from ..model.inputs import SequenceChunk, make_inputs
from ..request import Request
from .draft_cache import CachedSequence, DraftCache
from .drawing import DraftDrawing, GrowingChain, draw_next
from .fair_shares import fair_shares
from .proposer import DraftRequest

MAX_CATCH_UP_TOKENS = 256
"""Maximum known tokens, over all requests, that the drafting of one step computes. A long prompt
takes several steps, and is drafted for after that."""
LEAST_SHARE = 2
"""Known tokens that every request may compute anyway: the last draft token, if all were accepted,
and the token sampled after it."""


@dataclass(eq=False)
class Drafting:
    """A request for which a draft is being computed."""

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
        """The draft; the sequence records which of its tokens are only draft tokens."""
        num_draft_tokens = max(0, self.sequence.num_computed - len(self.request.token_ids))
        self.sequence.drafted = Draft(tuple(self.chain.token_ids[:num_draft_tokens]))
        return self.chain.draft()


class Piece(NamedTuple):
    """What one forward computes of a request."""

    drafting: Drafting
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether it reaches the last token, so that the next is drafted."""
        return self.num_tokens == self.drafting.num_missing

    def chunk(self) -> SequenceChunk:
        sequence = self.drafting.sequence
        return SequenceChunk(
            token_ids=self.drafting.next_tokens(self.num_tokens),
            start=sequence.num_computed,
            tables=sequence.tables,
            num_logits_rows=int(self.is_last),
            is_prompt=self.num_tokens > LEAST_SHARE,
            rotary_start=sequence.namespace.rotary_start,
        )


class DraftModelProposer:
    """Proposes for all requests at once: one forward pass per token, over those that need one."""

    name = DRAFT
    needs_hidden_states = False

    def __init__(
        self,
        model: BaseModel,
        *,
        pages: KvCache,
        graphs: DecodeGraphs | None = None,
        drawing: DraftDrawing,
        ends: Callable[[Request, int], bool],
        prefix_secret: bytes | None = None,
    ) -> None:
        """`pages`: of the model's own cache, a single group. `graphs`: over these pages; None where
        its steps run kernel by kernel. `ends`: whether a token ends a request's output; nothing is
        drafted behind it. `prefix_secret`: see `DraftCache`."""
        (group,) = pages.groups
        self.cache = DraftCache(
            group,
            pages.block_size,
            rotary_contexts=model.rotary_contexts,
            prefix_secret=prefix_secret,
            move=pages.move,
        )
        self._model = model
        self._pages = pages
        self._graphs = graphs
        self._drawing = drawing
        self._ends = ends

    def capture(self) -> list[str]:
        """Capture its graphs, before the first step; returns a summary for the operator."""
        if self._graphs is None:
            return []
        return [f"draft model: {self._graphs.capture(keeps_hidden_states=False)}"]

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        try:
            pieces = self._first_pieces(self._begin(wanted))
            drafts = self._propose(pieces)
            return [drafts.get(request, NO_DRAFT) for request, _ in wanted]
        except BaseException:
            # The state of an interrupted call is unknown.
            self._model.forget_step()
            for request, _ in wanted:
                self.forget(request.request_id)
            raise

    def observe(self, request: Request, hidden_state: Tensor | None) -> None:
        """The next call compares its draft tokens with what the request has become."""

    def forget(self, request_id: str) -> None:
        self.cache.drop(request_id)

    def _begin(self, wanted: Sequence[DraftRequest]) -> list[Drafting]:
        """Those that the model can take: no longer than it was trained for, or than its cache."""
        drafting = []
        for request, num_tokens in reversed(wanted):  # the first is to be the last given up
            num_known = len(request.token_ids)
            num_tokens = min(num_tokens, self._model.max_model_len + 1 - num_known)
            if num_tokens < 1 or not self.cache.can_hold(num_known + num_tokens - 1):
                self.forget(request.request_id)
                continue
            chain = GrowingChain(request, num_tokens)
            drafting.append(Drafting(chain, self.cache.settle(request)))
        return drafting[::-1]

    def _first_pieces(self, drafting: Sequence[Drafting]) -> list[Piece]:
        """What each may compute of its known tokens, where there is room for what it computes."""
        budget = max(MAX_CATCH_UP_TOKENS, LEAST_SHARE * len(drafting))
        shares = fair_shares([entry.num_missing for entry in drafting], budget)
        pieces: list[Piece] = []
        keep: set[str] = set()
        for entry, share in zip(drafting, shares, strict=True):
            piece = Piece(entry, share)
            request_id = entry.request.request_id
            num_tokens = share + entry.chain.num_tokens - 1 if piece.is_last else share
            if request_id in self.cache and self.cache.reserve(request_id, num_tokens, keep):
                keep.add(request_id)
                pieces.append(piece)
        self._pages.execute(self.cache.take_operations())
        return pieces

    def _propose(self, pieces: Sequence[Piece]) -> dict[Request, Draft]:
        """Compute these, propose after those that are complete, and so on."""
        drafting = [piece.drafting for piece in pieces]
        while pieces:
            complete, logits = self._compute(pieces)
            pieces = [Piece(entry, 1) for entry in self._draw(complete, logits)]
        return {entry.request: entry.draft() for entry in drafting}

    def _compute(self, pieces: Sequence[Piece]) -> tuple[list[Drafting], Tensor]:
        """Compute these; return those that are complete, and their logits."""
        pieces = sorted(
            pieces, key=lambda piece: (piece.num_tokens, piece.drafting.sequence.num_computed)
        )
        logits = self._run([piece.chunk() for piece in pieces])
        complete = [piece.drafting for piece in pieces if piece.is_last]
        for entry, num_tokens in pieces:
            self.cache.advance(entry.request, num_tokens)
        return complete, logits

    def _draw(self, drafting: Sequence[Drafting], logits: Tensor) -> list[Drafting]:
        """Draft a token for each by its row of logits; return those that want another.

        One whose logits are not finite is given up: its cache holds what must not be used.
        """
        finite = finite_rows(logits).tolist()
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

    def _run(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        """fp32 logits of the logits rows, valid until the next call."""
        if self._graphs and self._graphs.serves(chunks):
            output = self._graphs.run(chunks)
            if output is not None:
                return output.logits
        inputs = make_inputs(
            chunks,
            groups=self._pages.groups,
            block_size=self._pages.block_size,
            device=self._model.device,
        )
        return run_model(
            self._model.model,
            PagedForward.of(self._pages, inputs),
            inputs.input_ids,
            inputs.positions,
            inputs.logits_rows,
        )
