"""The input embedding: a table whose rows adapters add to, or replace.

The embedding itself stays where and as it is, maybe tied to the output head; a hook changes what it
returns. LoRA's A is stored by token, so a token's delta is one row of A times B.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.arena import Arena
from ..adapters.block import ExtraKind
from ..adapters.layout import Projection, Slice, SliceKind
from ..kernels.lora_batch import Segment
from .forward import current_forward
from .slice_extras import TokenRows, by_kind, change_embedding, values

_PIECE_TOKENS = 1024


class InputEmbedding:
    """The model's own embedding, with the adapters' changes added."""

    def __init__(self, name: str, module: nn.Embedding, *, scale: float) -> None:
        """scale: what the module multiplies the rows of its table by."""
        self.projection = Projection(
            (Slice(name, module.num_embeddings, module.embedding_dim, SliceKind.EMBEDDING),)
        )
        self.base_weights = TableWeights(module)
        self._scale = scale
        self._arena: Arena | None = None
        self._slice_index = 0
        self._token_rows = TokenRows()
        module.register_forward_hook(self._change)

    def attach(self, arena: Arena, slice_range: range) -> None:
        self._arena, self._slice_index = arena, slice_range.start

    def forget_adapter(self, row: int) -> None:
        self._token_rows.forget(row)

    def forget_step(self) -> None:
        """It keeps nothing of a step."""

    def _change(self, _module: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
        step = current_forward()
        if self._arena and step and step.embedding_segments:
            token_ids, rows = args[0].reshape(-1), y.view(-1, y.shape[-1])
            for segment in step.embedding_segments:
                own = slice(segment.start, segment.end)
                self._change_rows(self._arena, segment, token_ids[own], rows[own])

    def _change_rows(self, arena: Arena, segment: Segment, token_ids: Tensor, y: Tensor) -> None:
        if extras := arena.row_extras[segment.row].get(self._slice_index):
            held = by_kind(extras)
            replaced_ids = None
            if placed := held.get(ExtraKind.TOKEN_ROWS):
                replaced_ids = self._token_rows.token_ids(segment.row, placed, y.device)
            served = {kind: values(arena.flat, placed) for kind, placed in held.items()}
            change_embedding(token_ids, y, self._scale, served, replaced_ids)
        a_offset, b_offset, rank = arena.row_tables[segment.row][self._slice_index]
        if rank:
            num_tokens, out_features = self.projection.in_features, y.shape[-1]
            a = arena.flat[a_offset : a_offset + num_tokens * rank].view(num_tokens, rank)
            b = arena.flat[b_offset : b_offset + rank * out_features].view(rank, out_features)
            y.addmm_(a[token_ids], b, alpha=self._scale)


class TableWeights:
    """The transposed table `[dim, tokens]`, as BaseWeights: a token selects one of its columns."""

    bias = None

    def __init__(self, module: nn.Embedding) -> None:
        self._table = module.weight.detach()

    @cached_property
    def row_norms(self) -> Tensor:
        squares = torch.zeros(self._table.shape[1], device=self._table.device)
        for rows in self._table.split(_PIECE_TOKENS):
            squares += rows.float().square().sum(dim=0)
        return squares.sqrt()

    def products(self, x: Tensor) -> Tensor:
        result = torch.zeros(x.shape[0], self._table.shape[1], device=self._table.device)
        pieces = zip(x.split(_PIECE_TOKENS, dim=1), self._table.split(_PIECE_TOKENS), strict=True)
        for columns, rows in pieces:
            result += columns.float() @ rows.float()
        return result
