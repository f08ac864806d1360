"""The part of a base's layout that one rank of a group holds. Torch-free.

A block's file holds whole matrices. A rank's block holds the same matrices with this rank's inputs
and outputs only, or of this rank's experts only, in the same order, so slice indices mean the same
on every rank. To a rank of a pipeline's stage, an adapter changes the layers of this stage only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from .block import BlockPlan, Extra, ExtraKind
from .errors import ObjectCorrupt
from .layout import BaseLayout, Projection, Slice


class SliceRange(NamedTuple):
    """The inputs and outputs of one slice that a rank holds."""

    inputs: range
    outputs: range


@dataclass(frozen=True)
class LayoutPart:
    """What one rank holds of each slice of a base."""

    whole: BaseLayout
    ranges: Mapping[str, SliceRange] = field(default_factory=dict)
    """By slice name. A slice that is not named is held whole."""
    experts: Mapping[str, range] = field(default_factory=dict)
    """By the name of a slice of experts: those that are held, each whole. A slice that is not named
    is held whole."""
    held: frozenset[str] | None = None
    """The names of the slices of which anything is held; None: all."""

    @cached_property
    def layout(self) -> BaseLayout:
        """The layout of the rank's own matrices."""
        if not (self.ranges or self.experts):
            return self.whole
        projections = tuple(
            Projection(tuple(map(self.part_of, projection.slices)))
            for projection in self.whole.projections
        )
        return replace(self.whole, projections=projections)

    def holds(self, slice_index: int) -> bool:
        """Whether the rank holds anything of this slice."""
        return self.held is None or self.whole.slices[slice_index].name in self.held

    def plan(self, ranks: Mapping[int, int], extras: Iterable[Extra]) -> BlockPlan:
        """The rank's block of an adapter, given the rank of each slice that it changes and its
        auxiliary tensors. Raises ObjectCorrupt as `extra_part`."""
        held = {index: rank for index, rank in ranks.items() if self.holds(index)}
        own = (self.extra_part(extra) for extra in extras if self.holds(extra.slice_index))
        return BlockPlan(self.layout, held, tuple(own))

    def part_of(self, whole: Slice) -> Slice:
        """The rank's part of a slice of the whole layout."""
        experts, held = self.experts.get(whole.name), self.ranges.get(whole.name)
        if experts is not None:
            return replace(whole, num_experts=len(experts))
        if held is None:
            return whole
        return replace(whole, in_features=len(held.inputs), out_features=len(held.outputs))

    def range_of(self, slice_index: int) -> SliceRange:
        """What the rank holds of this slice."""
        whole = self.whole.slices[slice_index]
        held = self.ranges.get(whole.name)
        return held or SliceRange(range(whole.in_features), range(whole.out_features))

    def experts_of(self, slice_index: int) -> range:
        """The experts of this slice that the rank holds; of another kind of slice, its only one."""
        whole = self.whole.slices[slice_index]
        return self.experts.get(whole.name, range(whole.num_experts))

    def extra_part(self, extra: Extra) -> Extra:
        """The rank's part of an auxiliary tensor. Raises ObjectCorrupt if the tensor does not have
        the shape of a slice that is held in part."""
        whole = self.whole.slices[extra.slice_index]
        held = self.ranges.get(whole.name)
        if held is None:
            return extra
        stored: tuple[int, ...] = (whole.out_features,)
        shape: tuple[int, ...] = (len(held.outputs),)
        if extra.kind is ExtraKind.MATRIX:
            stored, shape = (*stored, whole.in_features), (*shape, len(held.inputs))
        if extra.shape != stored:
            raise ObjectCorrupt(f"{extra.kind} {list(extra.shape)} does not fit {whole.name}")
        return replace(extra, shape=shape)
