"""Determines which stacked expert parameter each pair of matrices belongs to.

PEFT wraps the experts module once per targeted parameter, and names a pair by the depth of its
wrapper, not by the parameter: `experts.lora_A` is the outermost, `experts.base_layer.lora_A` is
inside it. Shapes identify the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations

from .bound import BoundSlice
from .errors import AdapterRejected
from .layout import BaseLayout, Slice
from .peft_config import MAX_RANK, PeftConfig
from .safetensors_header import TensorEntry

_Pair = tuple[TensorEntry, TensorEntry]


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
        fitting = [indices for indices in fitting if _has_ranks(pairs, indices, config, layout)]
        if len(fitting) != 1:
            raise AdapterRejected(
                "ambiguous_experts",
                f"{pairs[0][0].name} fits several parameters: {_names(targets, layout)}",
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
    return fitting[0]


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
    a, b = pair
    rank, sizes = _rank(a, layer), (layer.in_features, layer.out_features)
    in_features, out_features = reversed(sizes) if layer.is_turned else sizes
    return (
        rank > 0
        and a.shape == (layer.num_experts * rank, in_features)
        and b.shape == (out_features, layer.num_experts * rank)
    )


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
    return BoundSlice(index, layer, a, b, rank, config.scale_of(layer.name), is_parameter=True)
