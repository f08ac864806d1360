"""The input embedding: adapters add to its rows or replace them.

The embedding may be tied to the output head. Unless it is quantized, it remains the model's own
module. In a step whose adapters change it, a hook changes its result. LoRA's A is stored by token,
so a token's delta is one row of A times B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...adapters.arena import Arena
from ...adapters.layout import Projection, Slice, SliceKind
from ...kernels.linear import QuantizedLinear
from ...kernels.lora_batch import Segment
from ...kernels.quantized_embedding import QuantizedEmbedding
from ..shards.vocabulary_plan import VocabularyPart
from .adapted_module import replace_module
from .slice_auxiliary import HeldAuxiliary, change_embedding

_PIECE_TOKENS = 1024


class InputEmbedding:
    """The model's own embedding, with the adapters' changes added."""

    def __init__(
        self, name: str, module: nn.Embedding, *, scale: float, part: VocabularyPart | None = None
    ) -> None:
        """scale: the factor with which the module multiplies the rows of its table. part: the
        tokens whose rows it has; None: all."""
        self.projection = Projection(
            (Slice(name, module.num_embeddings, module.embedding_dim, SliceKind.EMBEDDING),)
        )
        self.base_weights = TableWeights(
            lambda ids: F.embedding(ids, module.weight.detach()), module
        )
        self.name = name
        self.scale = scale
        self._part = part or VocabularyPart(range(module.num_embeddings), module.num_embeddings)
        self._module: nn.Embedding | QuantizedEmbedding = module
        self._adapters: _TableAdapters | None = None

    @property
    def num_tokens(self) -> int:
        """Those of the base, on all ranks together."""
        return self._part.num_tokens

    @property
    def is_partial(self) -> bool:
        """Whether other ranks have the rest of its tokens."""
        return len(self._part.tokens) < self._part.num_tokens

    def read_from(self, linear: QuantizedLinear, model: nn.Module) -> None:
        """Let the model look tokens up in the rows of this layer's weight."""
        weight = self._module.weight
        packed = QuantizedEmbedding(
            linear, scale=self.scale, dtype=weight.dtype, device=weight.device
        )
        replace_module(model, self.name, packed)
        self.base_weights = TableWeights(linear.weight_rows, packed)
        self._module = packed

    def attach(self, arena: Arena, slice_range: range) -> None:
        num_tokens = self.projection.in_features
        self._adapters = _TableAdapters(arena, slice_range, num_tokens=num_tokens, scale=self.scale)

    def forget_adapter(self, row: int) -> None:
        if self._adapters:
            self._adapters.forget(row)

    def forget_step(self) -> None:
        """It keeps nothing between steps."""

    def change(self, segments: Sequence[Segment], token_ids: Tensor) -> RemovableHandle:
        """From now on, the embedding's results have the changes of these tokens' adapters, until
        the hook is removed. `token_ids [num_tokens]`: the step's, which may be added ones."""
        return self._module.register_forward_hook(
            lambda _module, _args, y: self._add(token_ids, y, segments)
        )

    def _add(self, token_ids: Tensor, y: Tensor, segments: Sequence[Segment]) -> None:
        assert self._adapters is not None, "adapters need an arena"
        rows = y.view(-1, y.shape[-1])
        if self.is_partial:  # what the rows of other tokens become is dropped
            token_ids = (token_ids - self._part.tokens.start).clamp(min=0)
        for segment in segments:
            own = slice(segment.start, segment.end)
            self._adapters.add(segment.row, token_ids[own], rows[own])


class _TableAdapters:
    """Changes the base's rows in those of one adapter."""

    def __init__(self, arena: Arena, slice_range: range, *, num_tokens: int, scale: float) -> None:
        self._arena = arena
        self._slice_index = slice_range.start
        self._num_tokens = num_tokens
        self._scale = scale
        self._auxiliary = HeldAuxiliary(arena, slice_range)

    def add(self, row: int, token_ids: Tensor, y: Tensor) -> None:
        """Change y `[n, out]`, the base's rows of token_ids `[n]`, in place."""
        for _, auxiliary in self._auxiliary.of_row(row):
            change_embedding(token_ids, y, self._scale, auxiliary)
        a_start, b_start, rank = self._arena.row_tables[row][self._slice_index]
        if rank:
            flat, out_features = self._arena.flat, y.shape[-1]
            a = flat[a_start : a_start + rank * self._num_tokens].view(-1, rank)
            a = a[token_ids.clamp(max=self._num_tokens - 1)]
            b = flat[b_start : b_start + rank * out_features].view(rank, out_features)
            y.addmm_(a, b, alpha=self._scale)

    def forget(self, row: int) -> None:
        """Drop cached data of a table row's adapter."""
        self._auxiliary.forget(row)


class TableWeights:
    """The transposed table `[dim, tokens]`, as BaseWeights: a token selects one of its columns."""

    bias = None

    def __init__(
        self, read_rows: Callable[[Tensor], Tensor], module: nn.Embedding | QuantizedEmbedding
    ) -> None:
        """read_rows: the rows `[n, dim]` of the tokens `[n]`, without the module's factor."""
        self._read_rows = read_rows
        self._tokens = torch.arange(module.num_embeddings, device=module.weight.device)
        self._dim = module.embedding_dim

    @cached_property
    def row_norms(self) -> Tensor:
        squares = self._zeros(self._dim)
        for tokens in self._tokens.split(_PIECE_TOKENS):
            squares += self._read_rows(tokens).float().square().sum(dim=0)
        return squares.sqrt()

    def products(self, x: Tensor) -> Tensor:
        result = self._zeros(x.shape[0], self._dim)
        for tokens in self._tokens.split(_PIECE_TOKENS):
            result += x[:, tokens].float() @ self._read_rows(tokens).float()
        return result

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self._tokens.device, dtype=torch.float32)
