"""Computes a decoder layer in one call of the CPU's library.

transformers computes it in some thirty calls, which take longer than their work when few rows
decode. As in `fused_layers`, no list of names decides: a layer is replaced if the replacement gives
the very bits of the layer's own code. Steps with adapters that are more than LoRA keep that code,
and so do steps with prompt chunks where the library does not attend them.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.attention import AttentionOptions
from ...kernels.decoder_layer_cpu import (
    DecoderLayerOnCpu,
    DecoderLayerParts,
    LayerNorm,
    LayerWork,
    StepRows,
    serves_chunks,
    serves_decoder_layer,
)
from ...kernels.gated_activation import Activation
from ...kernels.lora_batch import LoraBatch
from ..kv.cache import KvCache, KvFormat
from ..kv.groups import LayerKvShape, simple_groups
from ..kv.sequence_blocks import BlockTable, block_table
from .forward import PagedForward, current_forward, run_model
from .fused_layers import NO_LAYERS, FusedMlp, FusedNorm, Share
from .inputs import MAX_GROUPED_ROWS, SequenceChunk, StepInputs, make_inputs
from .layer_list import layer_list
from .linear import FusedProjection, LinearAdapters, ProjectionSlice
from .rotary_tables import contexts_of
from .small_copy import find_thresholds

TRIAL_BLOCK_SIZE = 16
"""The library takes blocks of whole vectors."""
NUM_TRIAL_BLOCKS = 2
"""Of each sequence."""
TRIAL_STEPS = (
    ((0, 6), (0, 3), (0, 5), (0, 1)),
    ((6, 1), (3, 3), (5, MAX_GROUPED_ROWS + 1), (1, 1)),
)
"""The place of each sequence's first token and how many follow, by step: short prompts, then
decodes, a verification and a prompt chunk, which is left out where chunks are not one call."""
_NUM_TRIAL_PLACES = max(first + count for first, count in TRIAL_STEPS[-1])

layer_seconds: list[ctypes.Array[ctypes.c_double]] = []
"""Empty, or the array of `measured_layers`."""


@contextmanager
def measured_layers() -> Iterator[ctypes.Array[ctypes.c_double]]:
    """Meanwhile layers that are one call add their seconds by LayerWork to the array."""
    seconds = (ctypes.c_double * len(LayerWork))()
    layer_seconds.append(seconds)
    try:
        yield seconds
    finally:
        layer_seconds.remove(seconds)


class Projections(NamedTuple):
    """A layer's projections in the order of their products."""

    qkv: FusedProjection
    o: FusedProjection
    gate_up: FusedProjection
    down: FusedProjection


class OneCallLayer:
    """The forward pass of a decoder layer that the library computes."""

    def __init__(
        self,
        layer_index: int,
        projections: Projections,
        parts: DecoderLayerParts,
        own: Callable[..., Any],
    ) -> None:
        """`own`: the layer's own forward pass, for all other steps."""
        self._layer_index = layer_index
        self._projections = projections
        self._linears = parts.linears
        self._options = parts.options
        self._serves_chunks = serves_chunks(parts.dtype)
        self._on_cpu = DecoderLayerOnCpu(parts)
        self._own = own
        self.is_last = False
        """It computes only the rows of its result that are read. After the last layer no row
        depends on another: else the self-test's chunks would have refused the model."""

    def __call__(self, hidden_states: Tensor, *args: Any, **others: Any) -> Any:
        step, rotation = current_forward.get(), others.get("position_embeddings")
        if isinstance(step, PagedForward) and isinstance(rotation, tuple):
            result = self.served(step, hidden_states, rotation)
            if result is not None:
                return result
        return self._own(hidden_states, *args, **others)

    def served(
        self, step: PagedForward, hidden_states: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        """The result for `hidden_states [1, num_tokens, size]` and a rotation `[1, num_tokens,
        dim]`; None, without effect, for a step that needs the layer's own code."""
        index, lora, adapters = self._layer_index, step.lora, self._adapters()
        group = step.cache.group_of[index]
        is_plain = lora is None or (adapters and _is_lora_alone(lora))
        has_chunks = bool(step.attention[group].chunks)
        if not is_plain or not self._multiplies_own() or (has_chunks and not self._serves_chunks):
            return None
        options, (window, sinks) = self._options, step.cache.windows[index]
        if window is not None:
            options = replace(options, window=window, num_sink_positions=sinks)
        weights = adapters[0].arena if lora else None
        rows = step.rows.get(group)
        if rows is None or rows.rotation is not rotation:
            seconds = next(iter(layer_seconds), None)
            rows = StepRows(rotation, step.attention[group], lora, weights, step.kept, seconds)
            step.rows[group] = rows
        result = self._on_cpu.run(
            hidden_states[0],
            rows,
            (step.cache.keys[index], step.cache.values[index]),
            options,
            None if weights is None else [each.lora.described(weights) for each in adapters],
            is_last=self.is_last,
        )
        return None if result is None else result[None]

    def _adapters(self) -> list[LinearAdapters]:
        """Of each projection; empty before an arena is attached to all."""
        found = [each.adapters for each in self._projections if each.adapters is not None]
        return found if len(found) == len(self._projections) else []

    def _multiplies_own(self) -> bool:
        """Whether the projections have the layer's weights: those of a base's drafts differ."""
        pairs = zip(self._projections, self._linears, strict=True)
        return all(projection.linear is linear for projection, linear in pairs)


def _is_lora_alone(lora: LoraBatch) -> bool:
    """Whether the library adds all that the adapters of a step change in a layer."""
    return not (lora.segments or lora.auxiliary or lora.launches_vectors)


def replace_decoder_layers(
    model: nn.Module, config: Any, shapes: Sequence[LayerKvShape], *, max_model_len: int
) -> Share:
    """Replace the layers of a model that `fuse_layers` has fused, on the CPU.

    Where settings name positions from which the model computes differently, the layers are tried
    at the last positions as well: Ministral 3 multiplies queries beyond its original context.
    """
    found = layer_list(model, config)
    if found is None:
        return NO_LAYERS
    layers = found[1]
    cache = _trial_cache(model, shapes)
    replacements: list[list[OneCallLayer | None]] = []
    starts = [0]
    if find_thresholds(config, max_model_len=max_model_len):
        starts.append(max(0, max_model_len - _NUM_TRIAL_PLACES))
    for first in starts:
        step, seen = _run_trial(model, cache, layers, config.vocab_size, first)
        replacements.append(
            [
                _replacement(index, layer, each, step)
                for index, (layer, each) in enumerate(zip(layers, seen, strict=True))
            ]
        )
    num_replaced = 0
    for layer, *each in zip(layers, *replacements, strict=True):
        if None not in each:
            layer.__dict__["forward"] = each[0]
            num_replaced += 1
    last = layers[-1].__dict__.get("forward")
    if isinstance(last, OneCallLayer):
        last.is_last = True
    return Share(num_replaced, len(layers))


@dataclass
class _Seen:
    """What a layer's own code has done in a step."""

    calls: str = ""
    """In their order: n is a norm, p a projection, counted once, and a attention."""
    norms: list[FusedNorm] = field(default_factory=list)
    projections: list[FusedProjection] = field(default_factory=list)
    attention: tuple[int, int, int] = (0, 0, 0)
    """The number of heads, of key/value heads, and the size of a head."""
    options: AttentionOptions | None = None
    hidden_states: Tensor | None = None
    rotation: Any = None
    result: Any = None

    def parts(self, activation: Activation) -> DecoderLayerParts | None:
        """The layer, if it has the form of one that the library computes."""
        found = re.fullmatch("np(nn)?ap(n?)npp(n?)", self.calls)
        weights = [norm.weight for norm in self.norms if norm.weight is not None]
        if found is None or self.options is None or len(weights) < len(self.norms):
            return None
        norms = iter(
            LayerNorm(weight, norm.eps, norm.form)
            for weight, norm in zip(weights, self.norms, strict=True)
        )
        qkv, o, gate_up, down = (projection.linear for projection in self.projections)
        has_head_norms, has_o_norm, has_down_norm = map(bool, found.groups())
        num_heads, num_kv_heads, head_dim = self.attention
        return DecoderLayerParts(
            *(qkv, o, gate_up, down),
            input_norm=next(norms),
            query_norm=next(norms) if has_head_norms else None,
            key_norm=next(norms) if has_head_norms else None,
            o_norm=next(norms) if has_o_norm else None,
            mlp_norm=next(norms),
            down_norm=next(norms) if has_down_norm else None,
            activation=activation,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            options=self.options,
        )


@dataclass(frozen=True, slots=True)
class _SeenForward(PagedForward):
    """A step that tells how its layers attend."""

    layers: list[_Seen] = field(default_factory=list)

    def attend(
        self, layer_index: int, q: Tensor, k: Tensor, v: Tensor | int, options: AttentionOptions
    ) -> Tensor:
        seen = self.layers[layer_index]
        seen.calls += "a"
        seen.attention = q.shape[1], k.shape[1], q.shape[2]
        seen.options = options
        return PagedForward.attend(self, layer_index, q, k, v, options)


def _trial_cache(model: nn.Module, shapes: Sequence[LayerKvShape]) -> KvCache:
    """With the blocks of `_trial_table`."""
    weight = next(model.parameters())
    return KvCache(
        simple_groups(shapes, 1 + NUM_TRIAL_BLOCKS * len(TRIAL_STEPS[-1])),
        shapes,
        block_size=TRIAL_BLOCK_SIZE,
        kv_format=KvFormat(weight.dtype),
        device=weight.device,
    )


def _run_trial(
    model: nn.Module, cache: KvCache, layers: nn.ModuleList, vocab_size: int, first: int
) -> tuple[PagedForward, list[_Seen]]:
    """What the layers' own code does in the last step of the trial, from position `first` on."""
    for places in TRIAL_STEPS:
        inputs = _trial_inputs(model, cache, places, vocab_size, first)
        step = _SeenForward.of(cache, inputs)
        step.layers.extend(_Seen() for _ in layers)
        with ExitStack() as hooks:
            for layer, seen in zip(layers, step.layers, strict=True):
                _watch(layer, seen, hooks)
            rows = torch.zeros(1, dtype=torch.int64)
            run_model(model, step, inputs.input_ids, inputs.positions, rows)
    return step, step.layers


def _trial_inputs(
    model: nn.Module,
    cache: KvCache,
    places: Sequence[tuple[int, int]],
    vocab_size: int,
    num_evicted: int,
) -> StepInputs:
    """As if so many tokens before each sequence's first place had been evicted."""
    generator = torch.Generator().manual_seed(0)
    contexts = contexts_of(model)
    weight = next(model.parameters())
    has_chunks = serves_chunks(weight.dtype)
    chunks = [
        SequenceChunk(
            torch.randint(vocab_size, (count,), generator=generator).tolist(),
            num_evicted + start,
            [_trial_table(sequence)] * len(cache.groups),
            num_evicted=num_evicted,
            rotary_start=contexts.start(num_evicted + start + count) if contexts else 0,
        )
        for sequence, (start, count) in enumerate(places)
        if has_chunks or count <= MAX_GROUPED_ROWS
    ]
    return make_inputs(
        chunks, groups=cache.groups, block_size=TRIAL_BLOCK_SIZE, device=weight.device
    )


def _trial_table(sequence: int) -> BlockTable:
    first = 1 + NUM_TRIAL_BLOCKS * sequence  # after the null block
    return block_table(range(first, first + NUM_TRIAL_BLOCKS))


def _watch(layer: nn.Module, seen: _Seen, hooks: ExitStack) -> None:
    """Let the layer's next forward pass be seen."""

    def norm(module: nn.Module, _args: Any, _result: Any) -> None:
        seen.calls += "n"
        seen.norms.append(module.__dict__["forward"])

    def projection(module: Any, _args: Any, _result: Any) -> None:
        if module.fused not in seen.projections:
            seen.calls += "p"
            seen.projections.append(module.fused)

    def whole(_module: nn.Module, args: Any, others: dict[str, Any], result: Any) -> None:
        seen.hidden_states = args[0] if args else others.get("hidden_states")
        seen.rotation, seen.result = others.get("position_embeddings"), result

    for module in layer.modules():
        if isinstance(module.__dict__.get("forward"), FusedNorm):
            hooks.callback(module.register_forward_hook(norm).remove)
        elif isinstance(module, ProjectionSlice):
            hooks.callback(module.register_forward_hook(projection).remove)
    hooks.callback(layer.register_forward_hook(whole, with_kwargs=True).remove)


def _replacement(
    index: int, layer: nn.Module, seen: _Seen, step: PagedForward
) -> OneCallLayer | None:
    """The layer in one call; None if that does not give the layer's own bits."""
    forwards = [module.__dict__.get("forward") for module in layer.modules()]
    mlps = [forward for forward in forwards if isinstance(forward, FusedMlp)]
    parts = seen.parts(mlps[0].activation) if len(mlps) == 1 else None
    if parts is None or not serves_decoder_layer(parts):
        return None
    if not isinstance(seen.rotation, tuple) or not isinstance(seen.hidden_states, Tensor):
        return None
    if not parts.fit_rows(seen.hidden_states, seen.rotation):
        return None
    replacement = OneCallLayer(index, Projections(*seen.projections), parts, layer.forward)
    pages = step.cache.keys[index].data, step.cache.values[index].data
    expected = [page.clone() for page in pages]
    with torch.inference_mode():
        result = replacement.served(step, seen.hidden_states, seen.rotation)
    if result is None or not isinstance(seen.result, Tensor):
        return None
    pairs = zip((result, *pages), (seen.result, *expected), strict=True)
    return replacement if all(torch.equal(ours, theirs) for ours, theirs in pairs) else None
