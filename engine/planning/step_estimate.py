"""What a full step takes on a device besides pools and weights, before it can be measured."""

from __future__ import annotations

from collections.abc import Sequence

from ...kernels.linear_packing import LinearKind
from ..config import EngineConfig
from ..execution.decode_graphs import max_rows
from ..execution.decode_inputs import DecodeLayout
from ..execution.graph_bytes import fixed_graph_bytes, num_captured_layers
from ..execution.profiling import PROFILE_CONTEXT
from ..kv.groups import one_group
from ..kv.layout import KvGroup
from ..memory.kv_demands import kv_groups
from ..model.expected_base import ExpectedBase

_RESIDUALS = 4
"""Tensors of `[rows, hidden size]` beside the widest layer: the tokens' embeddings, the residual
before and after it, and its normed input."""
_ROUNDING_FORMS = {
    LinearKind.DENSE,
    LinearKind.PACKED,
    LinearKind.BFLOAT16_PANEL,
    LinearKind.INT8_PANEL,
}
"""Their results are in the inputs' dtype."""


def activation_bytes(config: EngineConfig, base: ExpectedBase) -> int:
    """Of the step that a start measures: the last chunk of a long prompt.

    On the CPU it reads gathered keys and values of the whole context.
    """
    context = min(base.max_model_len, PROFILE_CONTEXT)
    num_tokens = min(config.max_num_batched_tokens, context)
    num_logits = min(config.max_kept_rows, num_tokens)
    step = max(_layer_bytes(base, num_tokens), _logits_bytes(base, num_logits))
    states = sum(shape.num_bytes for layer in base.kv_shapes or () for shape in layer.states)
    return step + _gathered_bytes(base, context) + config.max_num_seqs * states


def graph_bytes(config: EngineConfig, base: ExpectedBase) -> int:
    """Of captured decode steps, also of drafts; 0 where none is captured."""
    assert base.kv_shapes is not None, "known without values"
    groups = kv_groups(config, base.kv_shapes, max_model_len=base.max_model_len)
    num_layers = num_captured_layers(config, len(base.kv_shapes))
    return _graph_bytes(config, base, groups, num_layers, has_adapters=True)


def draft_graph_bytes(config: EngineConfig, draft: ExpectedBase) -> int:
    """The same of a draft model."""
    assert draft.kv_shapes is not None, "known without values"
    num_layers = len(draft.kv_shapes)
    return _graph_bytes(config, draft, one_group(num_layers, 2), num_layers, has_adapters=False)


def captures_graphs(config: EngineConfig, base: ExpectedBase) -> bool:
    """Not on the CPU, and not with states."""
    assert base.kv_shapes is not None, "known without values"
    has_states = any(layer.states for layer in base.kv_shapes)
    return base.device_type == "cuda" and not config.enforce_eager and not has_states


def _graph_bytes(
    config: EngineConfig,
    base: ExpectedBase,
    groups: Sequence[KvGroup],
    num_layers: int,
    *,
    has_adapters: bool,
) -> int:
    if not captures_graphs(config, base):
        return 0
    num_rows = max_rows(config)
    layout = DecodeLayout(
        tuple(groups),
        config.kv_block_size,
        num_rows,
        base.max_model_len,
        has_rotary_rows=base.rotary_contexts.has_tables,
        has_trees=config.drafts_trees,
    )
    step = max(_layer_bytes(base, num_rows), _logits_bytes(base, num_rows))
    return step + fixed_graph_bytes(
        config,
        layout,
        vocab_size=base.vocab_size,
        num_layers=num_layers,
        has_adapters=has_adapters,
    )


def _layer_bytes(base: ExpectedBase, num_tokens: int) -> int:
    """Of the layer that takes most: its input, its result and half as much again, of a gated
    activation or of turned queries and keys. Some forms give fp32 results on the CPU, which are
    rounded afterwards."""
    size = base.dtype.itemsize
    forms = {form for weights in base.weights.values() for form in weights.kernels}
    is_rounded = base.device_type == "cpu" and size < 4 and not forms <= _ROUNDING_FORMS
    per_output = 4 + size if is_rounded else 1.5 * size
    width = base.widest_result
    return int(num_tokens * (_RESIDUALS * base.hidden_size * size + width * per_output))


def _logits_bytes(base: ExpectedBase, num_rows: int) -> int:
    """In the serving dtype, and in fp32."""
    size = base.dtype.itemsize
    return num_rows * base.vocab_size * (size if size == 4 else size + 4)


def _gathered_bytes(base: ExpectedBase, context: int) -> int:
    if base.device_type != "cpu":
        return 0
    widths = [layer.num_heads * sum(layer.stored_dims) for layer in base.kv_shapes or ()]
    return context * max(widths, default=0) * base.dtype.itemsize
