"""The input embedding and the output head of which each rank has the rows of some tokens.

An embedding's row comes from the rank that has it: the others add zeros, so the sum is that row to
the bit. Of the head's result each rank computes its tokens' logits, and the first rank, which alone
samples, collects them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...adapters.layout_part import LayoutPart, SliceRange
from ..checkpoint.stored_weights import identity
from ..shards.rank_sums import RankSums
from ..shards.vocabulary_plan import VocabularyPart, divide_vocabulary
from .adapted_module import replace_module
from .embedding_and_head import ModelEnds
from .input_embedding import InputEmbedding
from .output_head import OutputHead
from .row_matrix import RowMatrix


def plan_vocabulary(ends: ModelEnds, num_ranks: int) -> tuple[VocabularyPart, ...]:
    """The parts of all ranks, in their order. Empty: every rank has both ends whole, because the
    vocabulary is small or one of the ends is more than its weight."""
    if ends.embedding is None or ends.head is None:
        return ()
    num_tokens = ends.embedding.num_tokens
    if num_ranks == 1 or ends.head.projection.out_features != num_tokens:
        return ()
    return divide_vocabulary(num_tokens, num_ranks)


def parts_of_ranks(
    own: LayoutPart, vocabulary: Sequence[VocabularyPart], num_ranks: int
) -> list[LayoutPart]:
    """What each rank holds, given this rank's part without the ends. Of the other ranks' layers the
    sizes are right."""
    if not vocabulary:
        return [own] * num_ranks
    layout = own.whole
    embedding, head = layout.slices[0], layout.slices[-1]
    return [
        replace(
            own,
            ranges={
                **own.ranges,
                embedding.name: SliceRange(part.tokens, range(embedding.out_features)),
                head.name: SliceRange(range(head.in_features), part.tokens),
            },
        )
        for part in vocabulary
    ]


def cut_ends(model: PreTrainedModel, ends: ModelEnds, part: VocabularyPart) -> ModelEnds:
    """Leave the rows of this rank's tokens in both ends, without reading them. Only if the
    vocabulary is divided."""
    assert ends.embedding is not None
    assert ends.head is not None
    table, linear = model.get_input_embeddings(), model.get_output_embeddings()
    _keep_rows((table, linear), part.tokens)
    table.num_embeddings, table.padding_idx = len(part.tokens), None
    linear.out_features = len(part.tokens)
    return replace(
        ends,
        embedding=InputEmbedding(ends.embedding.name, table, scale=ends.embedding.scale, part=part),
        head=OutputHead(ends.head.name, linear, part=part),
    )


def _keep_rows(modules: Iterable[nn.Module], rows: range) -> None:
    """From now on each module has these rows of its weight and bias only. Those that shared one
    weight share what is left of it."""
    weights: dict[object, nn.Parameter] = {}
    for module in modules:
        weight, bias = module.weight, getattr(module, "bias", None)
        assert isinstance(weight, Tensor)
        whole = identity(weight)
        if whole not in weights:
            weights[whole] = _rows_of(weight, rows)
        module.weight = weights[whole]
        if isinstance(bias, Tensor):
            module.bias = _rows_of(bias, rows)


def _rows_of(parameter: Tensor, rows: range) -> nn.Parameter:
    if isinstance(parameter, RowMatrix):
        return nn.Parameter(parameter.of_rows(rows), requires_grad=False)
    values = parameter.detach()[rows.start : rows.stop].clone()
    return nn.Parameter(values, requires_grad=False)


def join_ends(
    model: PreTrainedModel, ends: ModelEnds, vocabulary: Sequence[VocabularyPart], ranks: RankSums
) -> None:
    """Let the model compute with the ends of all ranks, as far as this stage has them."""
    if ends.embedding:
        name = ends.embedding.name
        own = model.get_submodule(name)
        part = vocabulary[ranks.place.rank]
        replace_module(model, name, DividedEmbedding(own, part, ranks))
    if ends.head:
        own = model.get_submodule(ends.head.name)
        replace_module(model, ends.head.name, DividedHead(ends.head, own, vocabulary, ranks))


class DividedEmbedding(nn.Module):
    """Looks tokens up on the ranks that have their rows; every rank gets all results."""

    def __init__(self, own: nn.Module, part: VocabularyPart, ranks: RankSums) -> None:
        """own: the embedding of this rank's tokens."""
        super().__init__()
        self.own = own
        self.num_embeddings, self.embedding_dim = part.num_tokens, own.embedding_dim
        self._tokens = part.tokens
        self._ranks = ranks

    @property
    def weight(self) -> Tensor:
        """This rank's: models ask their table for its dtype and device."""
        weight = self.own.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """`[...]` int64 to `[..., embedding_dim]`."""
        first, last = self._tokens[0], self._tokens[-1]
        is_other = (token_ids < first) | (token_ids > last)
        rows: Tensor = self.own(token_ids.clamp(first, last) - first)
        return self._ranks.add(rows.masked_fill(is_other[..., None], 0))


class DividedHead(nn.Module):
    """Computes the logits of this rank's tokens; the first rank gets those of all."""

    def __init__(
        self,
        head: OutputHead,
        own: nn.Module,
        vocabulary: Sequence[VocabularyPart],
        ranks: RankSums,
    ) -> None:
        """own: the layer of this rank's tokens."""
        super().__init__()
        self.own = own
        self.in_features, self.out_features = own.in_features, own.out_features
        self._head = head
        self._widths = [len(part.tokens) for part in vocabulary]
        self._ranks = ranks

    @property
    def num_logits(self) -> int:
        """Of a row's result, without added tokens."""
        rank = self._ranks.place.rank
        return self._widths[rank] if rank else sum(self._widths)

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., in]` to `[..., tokens]`: on the first rank of all ranks and of the tokens that
        the step's adapters add, on the others of their own tokens."""
        own: Tensor = self.own(x)
        *widths, last = self._widths
        parts = self._ranks.collect(own, [*widths, last + self._head.num_added])
        return torch.cat(parts, dim=-1) if parts else own
