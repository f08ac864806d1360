"""A proposer with Medusa heads (Cai et al. 2024, Medusa-1): a chain, or a small tree.

The heads read the hidden state of the last sampled token, which the step has computed anyway. They
are trained for the base, so with an adapter their acceptance rate is lower; the output does not
change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..checkpoint.files import locate_heads
from ..config import EngineConfig
from ..draft import NO_DRAFT, Draft
from ..errors import InvalidParameter, UnsupportedModel
from ..execution.grammar_masks import restrict_drafts
from ..execution.sampler import row_after
from ..model.base_model import BaseModel
from ..request import Request
from .draft_tree import Candidates, best_first_tree
from .drawing import DraftDrawing, GrowingChain, draw_next, log_beliefs, make_drawing
from .medusa_checkpoint import load_heads
from .medusa_heads import MedusaHeads
from .proposer import DraftRequest

CHAINS, TREES = "medusa", "medusa_tree"
MakeDrafts = Callable[[Sequence[DraftRequest], Tensor], list[Draft]]
"""From the heads' logits fp32 `[num_heads, len(wanted), vocab_size]` to a draft for each."""


class MedusaProposer:
    """Runs the heads once for all requests of a step."""

    needs_hidden_states = True

    def __init__(self, name: str, heads: MedusaHeads, make_drafts: MakeDrafts) -> None:
        self.name = name
        self.heads = heads
        self._make_drafts = make_drafts
        self._states: dict[str, Tensor] = {}
        """By request id, `[hidden_size]`: the state after its last token."""

    @torch.inference_mode()
    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        known = [entry for entry in wanted if entry.request.request_id in self._states]
        if not known:
            return [NO_DRAFT] * len(wanted)
        states = torch.stack([self._states[entry.request.request_id] for entry in known])
        num_heads = min(self.heads.num_heads, max(entry.num_tokens for entry in known))
        drafts = iter(self._make_drafts(known, self.heads(states, num_heads).float()))
        return [
            next(drafts) if entry.request.request_id in self._states else NO_DRAFT
            for entry in wanted
        ]

    def observe(self, request: Request, hidden_state: Tensor | None) -> None:
        if hidden_state is None:
            self.forget(request.request_id)
        else:
            # A copy: the row itself would hold on to all of its step's rows.
            self._states[request.request_id] = hidden_state.clone()

    def forget(self, request_id: str) -> None:
        self._states.pop(request_id, None)


def chains_by(drawing: DraftDrawing) -> MakeDrafts:
    """Makes chains whose tokens are sampled from the heads as the target samples from its
    logits."""

    def chains(wanted: Sequence[DraftRequest], logits: Tensor) -> list[Draft]:
        growing = [GrowingChain(request, num_tokens) for request, num_tokens in wanted]
        for head in logits:
            rows = [row for row, chain in enumerate(growing) if chain.wants_more]
            draw_next([growing[row] for row in rows], head[rows], drawing)
        return [chain.draft() for chain in growing]

    return chains


def coupled_trees(wanted: Sequence[DraftRequest], logits: Tensor) -> list[Draft]:
    """Trees of the tokens most likely to be the target's own sample, with the requested numbers of
    nodes."""
    width = min(max(entry.num_tokens for entry in wanted), logits.shape[-1])
    likeliest: list[list[int]] = [[] for _ in wanted]
    levels: list[list[Candidates]] = [[] for _ in wanted]
    requests = [entry.request for entry in wanted]
    for head in logits:
        rows = list(map(row_after, requests, likeliest))
        allowed = restrict_drafts(requests, likeliest, head)
        values, token_ids = log_beliefs(allowed, rows).topk(width)
        found = zip(token_ids.tolist(), values.tolist(), strict=True)
        for index, candidates in enumerate(found):
            levels[index].append(Candidates(*candidates))
            likeliest[index].append(levels[index][-1].token_ids[0])
    return [
        best_first_tree(own_levels, num_tokens)
        for own_levels, (_, num_tokens) in zip(levels, wanted, strict=True)
    ]


def open_medusas(config: EngineConfig, base: BaseModel) -> list[MedusaProposer]:
    """The proposers in the configuration: `medusa:CHECKPOINT` proposes chains, `medusa_tree` trees.

    They are opened before memory is divided, because of their heads; those of one checkpoint are
    loaded once. Raises InvalidParameter if the heads cannot be used.
    """
    heads: dict[str, MedusaHeads] = {}
    proposers = []
    for entry in config.speculation:
        name, _, checkpoint = entry.partition(":")
        if name in (CHAINS, TREES):
            drawing = make_drawing(config.acceptance)
            make_drafts = chains_by(drawing) if name == CHAINS else coupled_trees
            if checkpoint not in heads:
                heads[checkpoint] = _open_heads(name, checkpoint, base)
            proposers.append(MedusaProposer(name, heads[checkpoint], make_drafts))
    return proposers


def heads_bytes(proposers: Sequence[MedusaProposer]) -> int:
    """The bytes of all their heads."""
    return sum(heads.weight_bytes for heads in {proposer.heads for proposer in proposers})


def _open_heads(name: str, checkpoint: str, base: BaseModel) -> MedusaHeads:
    if not checkpoint:
        raise InvalidParameter("speculation", f"{name} requires a checkpoint: {name}:CHECKPOINT")
    head = base.ends.head
    if head is None:
        reasons = "; ".join(base.ends.refused.values())
        raise InvalidParameter("speculation", f"{name} cannot watch this base's head: {reasons}")
    part = base.layout.slices[base.layout.slice_index[head.name]]
    try:
        folder = locate_heads(checkpoint)
    except UnsupportedModel as exc:
        raise InvalidParameter("speculation", f"{name}: {exc}") from exc
    heads = load_heads(
        folder,
        hidden_size=part.in_features,
        vocab_size=part.out_features,
        base_id=base.layout.base_id,
        dtype=base.dtype,
    )
    return heads.to(base.device)
