"""Binds the matrices of experts that PEFT does not wrap as stacked parameters.

A and B of gate, up and down each come as one tensor per expert, as one tensor `[experts, …]`, or as
one that all experts share. An expert without A and B is unchanged. In the block, gate and up are
parts of one slice: their ranks follow one another, and B is zero at the other one's outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

from .arrangement import Arrangement, Order, Region
from .bound import BoundMatrix, BoundSlice
from .errors import AdapterRejected
from .expert_names import ExpertMatrix, Half, columns_of
from .layout import BaseLayout, Slice
from .peft_config import MAX_RANK, PeftConfig
from .safetensors_header import TensorEntry
from .tensor_names import TensorName, TensorRole


class ExpertTensor(NamedTuple):
    """A tensor of the file and what its name means."""

    name: TensorName
    tensor: TensorEntry
    matrix: ExpertMatrix

    @property
    def is_a(self) -> bool:
        return self.name.role is TensorRole.A

    @property
    def rank(self) -> int:
        """Of one expert, for a tensor of two or three dimensions."""
        return self.tensor.shape[-2 if self.is_a else -1]


_Factor = Mapping[int | None, ExpertTensor]
"""A or B: expert to its tensor; or None to one tensor for all."""


class _Pair(NamedTuple):
    """A and B of gate, of up, or of a whole slice."""

    half: Half
    a: _Factor
    b: _Factor
    rank: int
    """The largest of an expert."""

    @property
    def factors(self) -> Iterator[tuple[ExpertTensor | None, ExpertTensor | None]]:
        """Each expert's A and B, or those of all experts."""
        for expert in {*self.a, *self.b} - {None} or {None}:
            a, b = (factor.get(expert, factor.get(None)) for factor in (self.a, self.b))
            yield a, b


def bind_expert_parts(
    tensors: Iterable[ExpertTensor], config: PeftConfig, layout: BaseLayout
) -> Iterator[BoundSlice]:
    """Bind the tensors of all layers' experts.

    Raises AdapterRejected if one does not fit its slice or lacks its counterpart, or if several
    change the same weights.
    """
    by_slice: dict[int, dict[Half, list[ExpertTensor]]] = {}
    for part in tensors:
        halves = by_slice.setdefault(part.matrix.slice_index, {})
        halves.setdefault(part.matrix.half, []).append(part)
    for index, halves in by_slice.items():
        layer = layout.slices[index]
        pairs = [_pair(half, halves[half], config, layer) for half in Half if half in halves]
        if len(pairs) > 1 and pairs[0].half is Half.WHOLE:
            raise _several(next(iter(pairs[1].a.values())), layer)
        yield _bind(index, pairs, config, layer)


def _pair(half: Half, tensors: list[ExpertTensor], config: PeftConfig, layer: Slice) -> _Pair:
    for part in tensors:
        _check(part, columns_of(half, layer.halves, layer.out_features)[0], config, layer)
    a = _factor([part for part in tensors if part.is_a], layer)
    b = _factor([part for part in tensors if not part.is_a], layer)
    pair = _Pair(half, a, b, max(part.rank for part in tensors))
    for down, up in pair.factors:
        if down is None or up is None:
            name = (down or up or tensors[0]).tensor.name
            missing = "lora_B" if up is None else "lora_A"
            raise AdapterRejected("missing_pair", f"{name} has no {missing}", pointer=name)
        if down.rank != up.rank:
            raise AdapterRejected(
                "rank_mismatch",
                f"{down.tensor.name} has rank {down.rank}, its lora_B {up.rank}",
                pointer=down.tensor.name,
            )
    return pair


def _factor(tensors: list[ExpertTensor], layer: Slice) -> _Factor:
    factor: dict[int | None, ExpertTensor] = {}
    for part in tensors:
        expert = part.matrix.expert
        if expert in factor or (factor and (expert is None or None in factor)):
            raise _several(part, layer)
        factor[expert] = part
    return factor


def _several(part: ExpertTensor, layer: Slice) -> AdapterRejected:
    name = part.tensor.name
    return AdapterRejected(
        "config_contradiction",
        f"{name} changes {layer.name}, which other tensors change",
        pointer=name,
    )


def _check(part: ExpertTensor, out_features: int, config: PeftConfig, layer: Slice) -> None:
    """Check a tensor's shape and rank, and that its expert exists."""
    name, shape, expert = part.tensor.name, part.tensor.shape, part.matrix.expert
    if expert is not None and expert >= layer.num_experts:
        raise AdapterRejected(
            "wrong_base", f"{name}: this base has {layer.num_experts} experts", pointer=name
        )
    width = layer.in_features if part.is_a else out_features
    is_stacked = len(shape) == 3 and expert is None and shape[0] in (1, layer.num_experts)
    if not (len(shape) == 2 or is_stacked) or shape[-1 if part.is_a else -2] != width:
        expected = f"[rank, {width}]" if part.is_a else f"[{width}, rank]"
        raise AdapterRejected(
            "shape_mismatch",
            f"{name} is {list(shape)} where this base needs {expected}, per expert",
            pointer=name,
        )
    rank = config.rank_of(part.name.module)
    if part.rank != rank:
        raise AdapterRejected(
            "rank_mismatch",
            f"{name} has rank {part.rank}, its configuration says {rank}",
            pointer=name,
        )


def _bind(index: int, pairs: list[_Pair], config: PeftConfig, layer: Slice) -> BoundSlice:
    rank = sum(pair.rank for pair in pairs)
    if rank > MAX_RANK:
        name = next(iter(pairs[0].a.values())).tensor.name
        raise AdapterRejected(
            "rank_too_large",
            f"{name} and the other matrices of its experts have rank {rank} together; the most is"
            f" {MAX_RANK}",
            pointer=name,
        )
    a, b, first_row = [], [], 0
    for pair in pairs:
        shape = layer.num_experts, rank, layer.in_features
        for expert, part in pair.a.items():
            region = Region(shape, expert, first_row, 0, 1)
            a.append(BoundMatrix(part.tensor, Arrangement(Order.PLANES, region=region)))
        shape = layer.num_experts, rank, layer.out_features
        _, first_column, step = columns_of(pair.half, layer.halves, layer.out_features)
        for expert, part in pair.b.items():
            region = Region(shape, expert, first_row, first_column, step)
            arrangement = Arrangement(Order.TRANSPOSED_PLANES, region=region)
            scale = config.scale_of(part.name.module)
            b.append(BoundMatrix(part.tensor, arrangement, scale))
        first_row += pair.rank
    runs = _row_scales(pairs, config, layer.num_experts)
    scale, row_scales = (runs[0][1], ()) if len(runs) == 1 else (1.0, runs)
    return BoundSlice(index, layer, tuple(a), tuple(b), rank, scale, row_scales)


def _row_scales(
    pairs: list[_Pair], config: PeftConfig, num_experts: int
) -> tuple[tuple[int, float], ...]:
    """The runs of rows of B `[experts, rank, out]` that have one factor. Rows that no tensor fills
    are zero with any factor."""
    scales = [[0.0] * len(pairs) for _ in range(num_experts)]
    for place, pair in enumerate(pairs):
        for expert, part in pair.b.items():
            scale = config.scale_of(part.name.module)
            for row in scales if expert is None else [scales[expert]]:
                row[place] = scale
    known = next(scale for row in scales for scale in row if scale)
    runs = (
        (scale or known, pair.rank)
        for row in scales
        for scale, pair in zip(row, pairs, strict=True)
    )
    return tuple(
        (sum(num_rows for _, num_rows in run), scale)
        for scale, run in groupby(runs, key=lambda entry: entry[0])
    )
