"""The context of the running step for the model's layers.

transformers' classes call Loraplex's attention function and linear layers without additional
arguments, so a context variable provides the step during the model's forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ...kernels.attention import AttentionBatch, AttentionOptions, paged_attention
from ...kernels.kv_pages import write_pages
from ...kernels.lora_batch import LoraBatch, Segment
from ..errors import UnsupportedModel
from ..kv.cache import KvCache
from .step_adapters import StepAdapters

ATTENTION_NAME = "loraplex"
_IGNORED_KWARGS = frozenset(
    {
        *("is_causal", "position_ids", "use_cache", "sliding_window"),
        *("logits_to_keep", "output_attentions", "output_hidden_states", "output_router_logits"),
    }
)
"""Ignored keyword arguments: causality, positions and the cache are Loraplex's own, windows are
read from masks at load (`attention_windows`), and outputs are handled elsewhere."""


class ForwardContext(Protocol):
    """One forward of the model."""

    lora: LoraBatch | None
    """None: the whole step is base rows, and no LoRA code runs."""
    head_lora: LoraBatch | None
    """For the rows whose logits are kept; None: no adapter of the step changes the output head."""
    embedding_segments: Sequence[Segment]
    """The tokens whose adapters change the input embedding."""

    def attend(
        self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Store `k, v [num_tokens, kv_heads, dim]`, attend `q [num_tokens, heads, dim]`."""
        ...


class PagedForward:
    """A forward pass over the paged cache, as in every served step."""

    def __init__(
        self,
        cache: KvCache,
        attention: Sequence[AttentionBatch],
        adapters: StepAdapters | None = None,
    ) -> None:
        """`attention`: one batch per KV group. `adapters`: None for a step of base rows only."""
        adapters = adapters or StepAdapters()
        self.lora = adapters.lora
        self.head_lora = adapters.head
        self.embedding_segments: Sequence[Segment] = adapters.embedding
        self._cache = cache
        self._attention = attention

    def attend(
        self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        index = self._cache.group_of[layer_index]
        group, batch = self._cache.groups[index], self._attention[index]
        keys, values = self._cache.keys[layer_index], self._cache.values[layer_index]
        write_pages(keys, values, batch.slot_mapping, k, v)
        window, sinks = self._cache.windows[layer_index], 0
        if group.window is not None:  # the layer's own, or the operator's for one that sees all
            window, sinks = group.window, group.sinks
        if window is not None:
            options = replace(options, sliding_window=window, num_sink_positions=sinks)
        return paged_attention(q, keys, values, batch, options)


_CONTEXT: ContextVar[ForwardContext] = ContextVar("loraplex_forward")


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` the running step for every layer called inside."""
    token = _CONTEXT.set(context)
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def current_forward() -> ForwardContext | None:
    """The running step; None outside of one, as in a dense reference forward."""
    return _CONTEXT.get(None)


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
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: `[1, heads, num_tokens, dim]` each.

    Raises UnsupportedModel for an unknown option that would change the result.
    """
    if attention_mask is not None:
        raise UnsupportedModel("its attention depends on a mask of its own")
    unknown = [name for name, value in others.items() if value is not None]
    if unexpected := set(unknown) - _IGNORED_KWARGS:
        raise UnsupportedModel(f"its attention takes {', '.join(sorted(unexpected))}")
    layer_index = module.layer_idx
    assert isinstance(layer_index, int)
    options = AttentionOptions(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        softcap=softcap,
        sinks=s_aux,
    )
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    out = _CONTEXT.get().attend(layer_index, q, k, v, options)
    return out[None], None


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
    with forward_context(context), torch.inference_mode():
        output = model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
        )
        logits: Tensor = output.logits[0]
        return logits.float() if out is None else out.copy_(logits)
