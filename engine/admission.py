"""Which base models are admitted: checks at load time instead of a list of names.

A model family is served if its attention can be replaced whole and the result is provably the
same: every layer must call the attention function exactly once, its layer types and rope must be
ones whose meaning we keep, and a chunked, mixed, paged forward of the loaded weights must equal
the model's own dense forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.attention import AttentionOptions
from ..kernels.lora_batch import LoraBatch, Segment
from .errors import UnsupportedModel
from .forward import PagedForward, run_model
from .inputs import MAX_GROUPED_ROWS, Span, make_inputs
from .kv_cache import KvCache, KvFormat
from .kv_groups import LayerKvShape, one_group

SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
BATCH_WIDE_ROPE_TYPES = frozenset({"longrope", "dynamic"})
"""Their frequencies depend on the longest sequence of the batch, so neighbours would change each
other's answers beyond the original context."""
SELF_TEST_LENGTHS = (23, 9)
SELF_TEST_CHUNKS = (MAX_GROUPED_ROWS + 1, 1, 4)
SELF_TEST_BLOCK_SIZE = 4
SELF_TEST_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest error relative to the largest logit; the half types round at every layer."""


def check_config(config: Any, *, max_model_len: int | None) -> int:
    """The longest sequence this configuration serves; raises UnsupportedModel if it serves none."""
    layer_types = set(getattr(config, "layer_types", None) or ())
    if foreign := layer_types - SERVED_LAYER_TYPES:
        raise UnsupportedModel(f"{config.model_type} has {', '.join(sorted(foreign))} layers")
    if getattr(config, "quantization_config", None):
        raise UnsupportedModel(
            "the checkpoint is already quantized: give the original one and --quantize"
        )
    trained = int(getattr(config, "max_position_embeddings", 0) or 2048)
    rope = getattr(config, "rope_parameters", None) or {}
    if _rope_types(rope) & BATCH_WIDE_ROPE_TYPES:
        original = rope.get("original_max_position_embeddings")
        trained = min(trained, int(original or trained))
    if max_model_len is not None and max_model_len > trained:
        raise UnsupportedModel(f"max_model_len {max_model_len} exceeds the model's {trained}")
    return max_model_len or trained


def probe_kv_shapes(model: nn.Module, config: Any) -> list[LayerKvShape]:
    """Run one token to see what each layer caches and how far back it looks.

    Raises UnsupportedModel unless each layer calls the attention function exactly once: a model
    that goes past it would be served silently wrong.
    """
    probe = ShapeProbe()
    device = next(model.parameters()).device
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    run_model(model, probe, zero, zero, zero)
    num_layers = config.num_hidden_layers
    if sorted(probe.calls) != list(range(num_layers)):
        raise UnsupportedModel(
            f"{config.model_type} calls the attention interface {len(probe.calls)} times "
            f"in {num_layers} layers"
        )
    return [shape for _, shape in sorted(probe.shapes.items())]


def dense_reference(model: nn.Module, vocab_size: int) -> list[tuple[list[int], Tensor]]:
    """The model's own logits of fixed random sequences, before anything in it is replaced."""
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    cases = []
    for length in SELF_TEST_LENGTHS:
        token_ids = torch.randint(vocab_size, (length,), generator=generator)
        with torch.inference_mode():
            logits = model(input_ids=token_ids[None].to(device), use_cache=False).logits[0]
        cases.append((token_ids.tolist(), logits.float()))
    return cases


def check_parity(
    model: nn.Module, shapes: list[LayerKvShape], cases: list[tuple[list[int], Tensor]]
) -> float:
    """The error of the paged, chunked, mixed forward, its KV cache in the model's own dtype.

    Raises UnsupportedModel when it exceeds what the dtype's rounding explains.
    """
    dtype = next(model.parameters()).dtype
    error = paged_error(model, shapes, cases, KvFormat(dtype))
    if not error <= SELF_TEST_TOLERANCE[dtype]:
        raise UnsupportedModel(
            f"its paged forward differs from its own dense forward by {error:.1e} of the logits"
        )
    return error


def paged_error(
    model: nn.Module,
    shapes: list[LayerKvShape],
    cases: list[tuple[list[int], Tensor]],
    kv_format: KvFormat,
) -> float:
    """By how much the paged forward's logits differ from `cases`, relative to the largest."""
    paged = _run_paged(model, shapes, [token_ids for token_ids, _ in cases], kv_format)
    return max(
        ((ours - theirs).abs().max() / theirs.abs().max()).item()
        for ours, (_, theirs) in zip(paged, cases, strict=True)
    )


def _run_paged(
    model: nn.Module,
    shapes: list[LayerKvShape],
    sequences: list[list[int]],
    kv_format: KvFormat,
) -> list[Tensor]:
    """Logits of all positions, computed in chunks of SELF_TEST_CHUNKS, all sequences in a batch."""
    size = SELF_TEST_BLOCK_SIZE
    per_sequence = -(-max(map(len, sequences)) // size)
    device = next(model.parameters()).device
    cache = KvCache(
        one_group(len(shapes), 1 + per_sequence * len(sequences)),
        shapes,
        block_size=size,
        kv_format=kv_format,
        device=device,
    )
    tables = [
        list(range(1 + per_sequence * index, 1 + per_sequence * (index + 1)))
        for index in range(len(sequences))
    ]
    done = [0] * len(sequences)
    logits: list[list[Tensor]] = [[] for _ in sequences]
    step = 0
    while any(done[index] < len(tokens) for index, tokens in enumerate(sequences)):
        spans = {}
        for index, tokens in enumerate(sequences):
            count = SELF_TEST_CHUNKS[(step + index) % len(SELF_TEST_CHUNKS)]
            if chunk := tokens[done[index] : done[index] + count]:
                spans[index] = Span(chunk, done[index], [tables[index]])
        order = sorted(spans, key=lambda index: len(spans[index].token_ids) > 1)
        inputs = make_inputs(
            [spans[index] for index in order],
            groups=cache.groups,
            block_size=size,
            device=device,
        )
        rows = torch.arange(len(inputs.input_ids), device=device)
        out = run_model(
            model, PagedForward(cache, inputs.attention), inputs.input_ids, inputs.positions, rows
        )
        for index, part in zip(
            order, out.split([len(spans[index].token_ids) for index in order]), strict=True
        ):
            logits[index].append(part)
            done[index] += len(part)
        step += 1
    return [torch.cat(parts) for parts in logits]


def _rope_types(rope: dict[str, Any]) -> set[str]:
    """The rope types of a configuration, which may be one for all layers or one per layer type."""
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return {str(part.get("rope_type", "default")) for part in (rope, *nested)}


class ShapeProbe:
    """A forward that stores nothing: it records which layers attend, and to what."""

    def __init__(self) -> None:
        self.lora: LoraBatch | None = None
        self.head_lora: LoraBatch | None = None
        self.embedding_segments: Sequence[Segment] = ()
        self.calls: list[int] = []
        self.shapes: dict[int, LayerKvShape] = {}

    def attend(
        self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        self.calls.append(layer_index)
        self.shapes[layer_index] = LayerKvShape(
            k.shape[1], k.shape[2], v.shape[2], window=options.sliding_window or None
        )
        return q.new_zeros(*q.shape[:2], v.shape[-1])
