"""Determines which stacked expert parameter each pair of matrices belongs to.

PEFT wraps the experts module once per targeted parameter, and names a pair by the depth of its
wrapper, not by the parameter: `experts.lora_A` is the outermost, `experts.base_layer.lora_A` is
inside it. Shapes identify the parameter. Where several parameters have one shape, the order does:
PEFT wraps them in the order in which the module has them, the first one innermost.

Before version 0.19, PEFT took the outputs of `[experts, out, in]` for the inputs: its A is
`[experts · rank, out]` and its B `[in, rank · experts]`. Current versions do so for the experts of
Llama 4. Shapes tell this, too. A pair that fits either way is taken as current versions do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations

from .arrangement import Arrangement, Order
from .bound import BoundMatrix, BoundSlice
from .errors import AdapterRejected
from .formats import refusal_message
from .layout import BaseLayout, Slice
from .peft_config import MAX_RANK, PeftConfig
from .safetensors_header import TensorEntry

_Pair = tuple[TensorEntry, TensorEntry]
_AS_STORED = Arrangement(Order.AS_STORED)


def bind_experts(
    module: str, levels: Mapping[int, _Pair], config: PeftConfig, layout: BaseLayout
) -> Iterator[BoundSlice]:
    """Bind the pairs around `module`, by the number of wrappers around each.

    Raises AdapterRejected if a pair fits no parameter, or if it is not clear which.
    """
    targets = [
        index
        for index in layout.expert_modules[module]
        if config.targets_parameter(layout.slices[index].name)
    ]
    pairs = [levels[depth] for depth in sorted(levels)]
    outermost = pairs[0][0]
    if max(levels) >= len(levels):
        raise AdapterRejected(
            "missing_pair",
            f"{module} has matrices at the depths {sorted(levels)}; one between them is missing",
            pointer=outermost.name,
        )
    if len(targets) < len(pairs):
        raise AdapterRejected(
            "config_contradiction",
            f"{module} carries LoRA on {len(pairs)} parameters; target_parameters names"
            f" {len(targets)} of them",
            pointer=outermost.name,
        )
    indices = _assign(pairs, targets, config, layout)
    for index, (a, b) in zip(indices, pairs, strict=True):
        yield _bind(index, a, b, config, layout)


def _assign(
    pairs: list[_Pair], targets: list[int], config: PeftConfig, layout: BaseLayout
) -> tuple[int, ...]:
    """The slice index of each pair."""
    fitting = [
        indices
        for indices in permutations(targets, len(pairs))
        if all(_fits(pair, layout.slices[i]) for pair, i in zip(pairs, indices, strict=True))
    ]
    if len(fitting) > 1:
        of_rank = [indices for indices in fitting if _has_ranks(pairs, indices, config, layout)]
        fitting = of_rank or fitting
    if len(fitting) > 1 and len(pairs) < len(targets):
        raise AdapterRejected(
            "ambiguous_experts",
            f"{pairs[0][0].name} fits several of {_names(targets, layout)}:"
            f" {refusal_message('experts_of_one_shape')}",
            pointer=pairs[0][0].name,
        )
    if not fitting:
        a, b = _first_unfit(pairs, targets, layout)
        raise AdapterRejected(
            "shape_mismatch",
            f"{a.name} is {list(a.shape)} and its lora_B {list(b.shape)}, which does not fit"
            f" {_names(targets, layout)}",
            pointer=a.name,
        )
    return max(fitting)  # the outermost first: the last parameter


def _has_ranks(
    pairs: list[_Pair], indices: tuple[int, ...], config: PeftConfig, layout: BaseLayout
) -> bool:
    """Whether every pair has the rank that is configured for its parameter."""
    layers = [layout.slices[index] for index in indices]
    return all(
        _rank(a, layer) == config.rank_of(layer.name)
        for (a, _), layer in zip(pairs, layers, strict=True)
    )


def _names(indices: list[int], layout: BaseLayout) -> str:
    return ", ".join(layout.slices[index].name for index in indices)


def _first_unfit(pairs: list[_Pair], targets: list[int], layout: BaseLayout) -> _Pair:
    """The first pair that fits no parameter; the outermost if each fits one."""
    for pair in pairs:
        if not any(_fits(pair, layout.slices[index]) for index in targets):
            return pair
    return pairs[0]


def _fits(pair: _Pair, layer: Slice) -> bool:
    return _fits_as_named(pair, layer) or _fits_turned(pair, layer)


def _fits_as_named(pair: _Pair, layer: Slice) -> bool:
    return _has_widths(pair, layer, layer.in_features, layer.out_features)


def _fits_turned(pair: _Pair, layer: Slice) -> bool:
    return _has_widths(pair, layer, layer.out_features, layer.in_features)


def _is_turned(pair: _Pair, layer: Slice) -> bool:
    """Whether A is what is multiplied last, for a pair that fits."""
    return not _fits_as_named(pair, layer) or (layer.is_turned and _fits_turned(pair, layer))


def _has_widths(pair: _Pair, layer: Slice, width_of_a: int, width_of_b: int) -> bool:
    a, b = pair
    num_rows = layer.num_experts * _rank(a, layer)
    return num_rows > 0 and a.shape == (num_rows, width_of_a) and b.shape == (width_of_b, num_rows)


def _rank(a: TensorEntry, layer: Slice) -> int:
    return a.shape[0] // layer.num_experts if a.shape else 0


def _bind(
    index: int, a: TensorEntry, b: TensorEntry, config: PeftConfig, layout: BaseLayout
) -> BoundSlice:
    layer = layout.slices[index]
    rank = _rank(a, layer)
    if rank > MAX_RANK:
        raise AdapterRejected(
            "rank_too_large", f"{a.name} has rank {rank}; the most is {MAX_RANK}", pointer=a.name
        )
    if rank != config.rank_of(layer.name):
        raise AdapterRejected(
            "rank_mismatch",
            f"{a.name} has rank {rank} per expert, its configuration says"
            f" {config.rank_of(layer.name)}",
            pointer=a.name,
        )
    scale = config.scale_of(layer.name)
    by_expert = Arrangement(Order.BY_EXPERT, layer.num_experts)
    if _is_turned((a, b), layer):
        down, up = BoundMatrix(b, by_expert), BoundMatrix(a, _AS_STORED, scale)
    else:
        down, up = BoundMatrix(a, _AS_STORED), BoundMatrix(b, by_expert, scale)
    return BoundSlice(index, layer, (down,), (up,), rank, scale, is_parameter=True)
