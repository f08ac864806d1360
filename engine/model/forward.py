"""The running step: what the model's layers compute with, and the adapters of its rows.

transformers' classes call Loraplex's attention function and linear layers without additional
arguments, so a context variable provides the step during the model's forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ...adapters.layout import BaseLayout, SliceKind
from ...kernels.attention import AttentionBatch, AttentionOptions, paged_attention
from ...kernels.decoder_layer_cpu import StepRows
from ...kernels.kv_pages import write_pages
from ...kernels.lora_batch import AdapterRun, LoraBatch, LoraBatchBuilder, LoraNeeds, Segment
from ..errors import UnsupportedModel
from ..kv.cache import KvCache
from .inputs import StepInputs
from .step_states import PagedStates, StepStates
from .step_vocabulary import StepVocabulary

ATTENTION_NAME = "loraplex"
LATENT_NAME = "latent_attention"
"""The attribute of an attention module that holds its LatentAttention."""
_IGNORED_KWARGS = frozenset(
    {
        *("is_causal", "position_ids", "use_cache", "sliding_window"),
        *("logits_to_keep", "output_attentions", "output_hidden_states", "output_router_logits"),
    }
)
"""Ignored keyword arguments: causality, positions and the cache are Loraplex's own, windows are
read from masks at load (`attention_windows`), and outputs are handled elsewhere."""


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """One step's rows and their adapters, for each part of the model; by default all are the
    base's.

    The decoder's projections and the embedding see every token, the output head only the rows
    whose logits are kept.
    """

    lora: LoraBatch | None = None
    """For all tokens; None: no adapter in the whole step."""
    head: LoraBatch | None = None
    """For the logits rows; None: no adapter changes the output head."""
    embedding: tuple[Segment, ...] = ()
    """The tokens whose adapters change the input embedding."""
    vocabulary: StepVocabulary | None = None
    """Of the logits rows; None: all have the base's."""

    @property
    def num_added_tokens(self) -> int:
        """Columns of the logits beyond the base's."""
        return 0 if self.vocabulary is None else self.vocabulary.num_added


class StepAdaptersBuilder:
    """Builds one StepAdapters per step."""

    def __init__(
        self,
        batches: LoraBatchBuilder,
        layout: BaseLayout,
        head_name: str | None,
        absorbed: Sequence[str] = (),
    ) -> None:
        """head_name: the output head's slice, if adapters may touch it. absorbed: the slices that
        attention multiplies by itself."""
        self._batches = batches
        self._embedding = next(
            (i for i, part in enumerate(layout.slices) if part.kind is SliceKind.EMBEDDING), None
        )
        self._experts = [
            i for i, part in enumerate(layout.slices) if part.kind is SliceKind.EXPERTS
        ]
        self._head = None if head_name is None else layout.slice_index[head_name]
        self._vocab_size = 0 if self._head is None else layout.slices[self._head].out_features
        self._elsewhere = [layout.slice_index[name] for name in absorbed]
        if self._embedding is not None:
            self._elsewhere.append(self._embedding)

    def needs(self, runs: Sequence[AdapterRun]) -> LoraNeeds | None:
        """What kernels alone must serve for these runs; None if they cannot: an adapter changes the
        input embedding or what attention multiplies by itself, or replaces the output head's matrix
        or rows of it."""
        return self._batches.needs(runs, elsewhere=self._elsewhere, experts=self._experts)

    def build(
        self,
        runs: Sequence[AdapterRun],
        kept: Sequence[AdapterRun],
        *,
        num_decodes: int,
    ) -> StepAdapters:
        """`runs` in the order of their tokens: those of `num_decodes` tokens decode; `kept` in the
        order of the rows whose logits are kept."""
        lora = self._batches.build(runs, num_decodes=num_decodes)
        head = None
        if self._head is not None and self._batches.rows_touching(self._head, kept):
            # Few rows of many adapters, as when decoding.
            num_rows = sum(run.num_tokens for run in kept)
            head = self._batches.build_touching(self._head, kept, num_decodes=num_rows)
        embedding: tuple[Segment, ...] = ()
        if self._embedding is not None and self._batches.rows_touching(self._embedding, runs):
            embedding = self._batches.segments_touching(self._embedding, runs)
        return StepAdapters(lora, head, embedding, self._vocabulary(kept))

    def _vocabulary(self, kept: Sequence[AdapterRun]) -> StepVocabulary | None:
        sizes = self._batches.vocab_sizes(kept)
        if not sizes:
            return None
        of_rows = [
            sizes.get(run.row, self._vocab_size) for run in kept for _ in range(run.num_tokens)
        ]
        return StepVocabulary.of(of_rows, self._vocab_size, self._batches.device)


class ForwardContext(Protocol):
    """One forward of the model."""

    @property
    def lora(self) -> LoraBatch | None:
        """None: the whole step is base rows, and no LoRA code runs."""
        ...

    @property
    def is_captured(self) -> bool:
        """Whether the step becomes a graph: nothing may wait for the device, or depend on anything
        in host memory but shapes."""
        ...

    @property
    def states(self) -> StepStates | None:
        """None for a model without states."""
        ...

    @property
    def rotary_rows(self) -> Tensor | None:
        """int64 `[num_tokens]`: where each token reads the tables of rotary embeddings
        (`rotary_tables`); None: at its position."""
        ...

    def attend(
        self, layer_index: int, q: Tensor, k: Tensor, v: Tensor | int, options: AttentionOptions
    ) -> Tensor:
        """Store `k, v [num_tokens, kv_heads, dim]`, attend `q [num_tokens, heads, dim]`.

        v: the values, or how many of k's first elements are the values.
        """
        ...


class LatentAttention(Protocol):
    """The attention of a layer that stores latents instead of keys and values."""

    def attend(
        self,
        step: ForwardContext,
        layer_index: int,
        q: Tensor,
        k: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """`q [num_tokens, heads, dim]` as for expanded keys, `k [num_tokens, 1, latent_dim +
        rotary_dim]`; returns `[num_tokens, heads, value_dim]` as for expanded values."""
        ...


@dataclass(frozen=True, slots=True)
class PagedForward:
    """A forward pass over the paged cache, as in every served step."""

    cache: KvCache
    attention: Sequence[AttentionBatch]
    """One batch per KV group."""
    lora: LoraBatch | None = None
    """None for a step of base rows only."""
    is_captured: bool = False
    states: PagedStates | None = None
    """See `ForwardContext.states`."""
    rotary_rows: Tensor | None = None
    """See `ForwardContext.rotary_rows`."""
    kept: Tensor | None = None
    """int64, ascending: the rows of the last layer's result that are read; None: all."""
    rows: dict[int, StepRows] = field(default_factory=dict)
    """By KV group, for the layers that are one call (`decoder_layers`); made by the first."""

    @classmethod
    def of(cls, cache: KvCache, inputs: StepInputs, lora: LoraBatch | None = None) -> Self:
        """The forward pass of these inputs."""
        batch = inputs.states
        states = None if batch is None else PagedStates(cache.states, cache.new_states, batch)
        return cls(cache, inputs.attention, lora, states=states, rotary_rows=inputs.rotary_rows)

    def attend(
        self, layer_index: int, q: Tensor, k: Tensor, v: Tensor | int, options: AttentionOptions
    ) -> Tensor:
        index = self.cache.group_of[layer_index]
        batch = self.attention[index]
        keys, values = self.cache.keys[layer_index], self.cache.values[layer_index]
        write_pages(keys, values, batch.slot_mapping, k, None if isinstance(v, int) else v)
        window, sinks = self.cache.windows[layer_index]
        if window is not None:
            options = replace(options, window=window, num_sink_positions=sinks)
        return paged_attention(q, keys, values, batch, options)


current_forward: ContextVar[ForwardContext | None] = ContextVar("loraplex_forward", default=None)
"""The running step; None outside of one, as in a dense reference forward."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    slopes: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: `[1, heads, num_tokens, dim]` each.

    slopes: ALiBi's, see `AttentionOptions`; transformers has no such argument.
    Raises UnsupportedModel for an unknown option that would change the result.
    """
    if attention_mask is not None:
        raise UnsupportedModel("its attention depends on its own mask")
    unknown = [name for name, value in others.items() if value is not None]
    if unexpected := set(unknown) - _IGNORED_KWARGS:
        raise UnsupportedModel(f"its attention takes {', '.join(sorted(unexpected))}")
    layer_index = module.layer_idx
    assert isinstance(layer_index, int)
    options = AttentionOptions(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        softcap=softcap,
        sinks=s_aux,
        slopes=slopes,
    )
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    step = current_forward.get()
    assert step is not None, "a served model attends within a step"
    latent: LatentAttention | None = module.__dict__.get(LATENT_NAME)
    if latent is None:
        return step.attend(layer_index, q, k, v, options)[None], None
    return latent.attend(step, layer_index, q, k, options)[None], None


AttentionInterface.register(ATTENTION_NAME, attention)


def run_model(
    model: nn.Module,
    context: ForwardContext,
    input_ids: Tensor,
    positions: Tensor,
    rows: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """One flat forward pass over `input_ids, positions [num_tokens]`.

    Returns fp32 logits `[len(rows), vocab_size]` of the tokens `rows`; in `out`, if given.
    """
    token = current_forward.set(context)
    try:
        with torch.inference_mode():
            output = model(
                input_ids=input_ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=rows,
            )
            if context.states is not None:
                context.states.commit()
            logits: Tensor = output.logits[0]
            return logits.float() if out is None else out.copy_(logits)
    finally:
        current_forward.reset(token)


def run_decoder(
    model: PreTrainedModel, context: ForwardContext, input_ids: Tensor, positions: Tensor
) -> None:
    """Like `run_model`, without logits: it leaves keys, values and states."""
    token = current_forward.set(context)
    try:
        with torch.inference_mode():
            model.base_model(
                input_ids=input_ids[None], position_ids=positions[None], use_cache=False
            )
            if context.states is not None:
                context.states.commit()
    finally:
        current_forward.reset(token)
