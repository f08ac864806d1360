"""The part of a base's layout that one rank of a group holds. Torch-free.

A block's file holds whole matrices. A rank's block holds the same matrices with this rank's inputs
and outputs only, or of this rank's experts only, in the same order, so slice indices mean the same
on every rank. The inputs of the input embedding and the outputs of the output head are tokens. To a
rank of a pipeline's stage, an adapter changes the layers of this stage only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from .block import VECTOR_KINDS, BlockPlan, Extra, ExtraKind
from .draft_head import DraftHeadForm
from .errors import ObjectCorrupt
from .layout import BaseLayout, Projection, Slice, SliceKind
from .resized_ends import own_vocabulary


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
    draft_heads: DraftHeadForm | None = None
    """The draft heads of adapters that are held; None: no draft heads."""

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
        extras = tuple(extras)
        held = {index: rank for index, rank in ranks.items() if self.holds(index)}
        own = (part for extra in extras if (part := self.extra_part(extra)) is not None)
        return BlockPlan(self.layout, held, tuple(own), own_vocabulary(extras, self.whole))

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
        return self.ranges.get(whole.name) or _all_of(whole)

    def experts_of(self, slice_index: int) -> range:
        """The experts of this slice that the rank holds; of another kind of slice, its only one."""
        whole = self.whole.slices[slice_index]
        return self.experts.get(whole.name, range(whole.num_experts))

    def extra_part(self, extra: Extra) -> Extra | None:
        """The rank's part of an auxiliary tensor; None: it holds nothing of it. The token ids are
        counted from the rank's first token. The rank with the base's first token, which answers,
        holds a classification head whole. Raises ObjectCorrupt as `extra_range`."""
        if not self.holds(extra.slice_index):
            return None
        if extra.kind is ExtraKind.DRAFT_HEAD:
            form = DraftHeadForm(extra.head_id, extra.num_elements)
            return extra if form == self.draft_heads else None
        whole = self.whole.slices[extra.slice_index]
        held = self.ranges.get(whole.name)
        if held is None:
            return extra
        if extra.kind is ExtraKind.CLASSIFICATION_HEAD:
            return extra if held.outputs.start == 0 else None
        rows, columns = self.extra_range(extra)
        if extra.kind in VECTOR_KINDS:
            return replace(extra, shape=(len(columns),))
        if not rows:
            return None
        first = _rows_and_columns(whole, held)[0].start
        tokens = tuple(token - first for token in extra.token_ids[rows.start : rows.stop])
        return replace(extra, shape=(len(rows), len(columns)), token_ids=tokens)

    def extra_range(self, extra: Extra) -> tuple[range, range]:
        """The rows and columns that the rank holds of an auxiliary tensor; a vector is one row. The
        rank with the base's last token also holds the rows of tokens that the adapter adds.

        Raises ObjectCorrupt if the tensor does not have the shape of the slice.
        """
        whole = self.whole.slices[extra.slice_index]
        held = self.range_of(extra.slice_index)
        if extra.kind in VECTOR_KINDS:
            _check(extra, whole, fits=extra.shape == (whole.out_features,))
            return range(1), held.outputs
        rows, columns = _rows_and_columns(whole, held)
        all_rows, all_columns = _rows_and_columns(whole, _all_of(whole))
        is_end = extra.slice_index in (self.whole.embedding, self.whole.output_head)
        ids: Sequence[int] = extra.token_ids
        if extra.kind is ExtraKind.MATRIX:
            ids = range(extra.shape[0])
            is_end = is_end or len(ids) == len(all_rows)
        _check(extra, whole, fits=is_end and extra.shape == (len(ids), len(all_columns)))
        start = bisect_left(ids, rows.start)
        is_last = rows.stop == all_rows.stop
        return range(start, len(ids) if is_last else bisect_left(ids, rows.stop)), columns


def _all_of(whole: Slice) -> SliceRange:
    return SliceRange(range(whole.in_features), range(whole.out_features))


def _rows_and_columns(whole: Slice, held: SliceRange) -> tuple[range, range]:
    """Those of a matrix in place of the base's; see `ExtraKind`."""
    inputs, outputs = held
    return (inputs, outputs) if whole.kind is SliceKind.EMBEDDING else (outputs, inputs)


def _check(extra: Extra, whole: Slice, *, fits: bool) -> None:
    if not fits:
        raise ObjectCorrupt(f"{extra.kind} {list(extra.shape)} does not fit {whole.name}")
