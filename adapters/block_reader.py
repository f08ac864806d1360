"""Reads an adapter's files into memory: what one engine, or one rank of a group, holds of it.

The ranks of a composition's members are joined: its A and B have the rows of all of them. Each
slice's scale, times the member's weight, is folded into B in fp32, and every value is rounded once
to the serving dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .block import BlockHeader, BlockPlan, PlacedExtra
from .block_files import BlockFiles, WeightedFile
from .errors import AdapterUnavailable, ObjectCorrupt
from .identity import AdapterKey
from .layout import SliceKind
from .layout_part import LayoutPart
from .loaders import UNPACED, Pace, Paced

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

PIECE_ELEMENTS = 32 << 10
"""Elements converted at a time. They fit into a core's cache, and torch starts no additional
threads for so few, so a load takes at most one core from the running step. After each piece the
loader thread pauses as its pace requires."""

Prepare = Callable[[Tensor, BlockHeader, BlockPlan], None]
"""Changes a block `[num_elements]` in place, in the loader thread that has read it, its scales
folded in. Raises AdapterUnavailable if it cannot be served."""


class BlockReader:
    """Reads the blocks of one base's adapters. Thread-safe."""

    def __init__(
        self, part: LayoutPart, *, prepare: Prepare | None = None, pace: Pace = UNPACED
    ) -> None:
        """`part`: what is held of each adapter. `prepare` converts the auxiliary tensors of a block
        to their served values; see `ExtraKind`. `pace`: the share of a core that reading may use
        while the engine's steps run."""
        self._part = part
        self._prepare = prepare
        self._pace = pace

    def plan(self, files: BlockFiles) -> BlockPlan:
        """The places in the block that is read. Raises ObjectCorrupt if a file is no block of its
        adapter and of this base."""
        for header, key in zip(files.headers, files.key.parts, strict=True):
            self._check(header, key)
        return self._part.plan(files.ranks, files.auxiliary)

    def fill(self, target: Tensor, files: BlockFiles, plan: BlockPlan) -> None:
        """Read the files into `target [plan.num_elements]`, which holds zeros.

        Raises ObjectCorrupt if a file is truncated, AdapterUnavailable if a value is not finite
        in the type of `target`, OSError.
        """
        work = Paced(self._pace)
        for each in files.weighted():
            with each.path.open("rb", buffering=0) as file:
                _fill(target, file, each.header, _arrays(each, self._part, plan), work)
        if self._prepare and plan.auxiliary:
            self._prepare(target, files.headers[0], plan)

    def _check(self, header: BlockHeader, key: AdapterKey) -> None:
        if header.digest != key.digest:
            raise ObjectCorrupt("the block belongs to another adapter")
        if header.base_id != self._part.whole.base_id:
            raise ObjectCorrupt("the block was made for another base model")
        num_slices = len(self._part.whole.slices)
        if not (header.ranks or header.auxiliary) or not all(
            0 <= index < num_slices and rank > 0 and math.isfinite(header.scales[index])
            for index, rank in header.ranks.items()
        ):
            raise ObjectCorrupt("the block's slices do not exist in this base model")
        if not all(
            sum(num_rows for num_rows, _ in runs)
            == header.ranks[index] * self._part.whole.slices[index].num_experts
            and all(num_rows > 0 and math.isfinite(scale) for num_rows, scale in runs)
            for index, runs in header.row_scales.items()
            if index in header.ranks
        ):
            raise ObjectCorrupt("the block's factors are not those of its rows")
        if not all(0 <= extra.slice_index < num_slices for extra in header.auxiliary):
            raise ObjectCorrupt("the block's extras belong to no slice of this base model")
        if _whole_plan(header, self._part).num_elements != header.num_elements:
            raise ObjectCorrupt("the block's size does not follow from its ranks")


class _Array(NamedTuple):
    """Rows of a matrix, in the payload of a file and in the block that is filled."""

    source: int
    """Where they begin in the payload, in elements."""
    target: int
    """Where they begin in the block."""
    num_rows: int
    width: int
    """Elements of a row in the file."""
    columns: range
    """Those of them that the block holds."""
    stride: int
    """Elements from one of the rows to the next in the block."""
    scale: float


class _Piece(NamedTuple):
    """Adjacent elements of the payload: rows of the block."""

    source: int
    target: int
    num_rows: int
    width: int
    stride: int
    scale: float

    def view_of(self, block: Tensor) -> Tensor:
        """Its place `[num_rows, width]` in the block."""
        return block[self.target :].as_strided((self.num_rows, self.width), (self.stride, 1))


def _fill(
    target: Tensor, file: FileIO, header: BlockHeader, arrays: Iterable[_Array], work: Paced
) -> None:
    """Convert what the arrays name of a block's file, piece by piece."""
    stored = torch.empty(PIECE_ELEMENTS, dtype=TORCH_DTYPES[header.dtype])
    scaled = torch.empty(PIECE_ELEMENTS, dtype=torch.float32)
    position = None
    try:
        for piece in chain.from_iterable(map(_pieces, arrays)):
            count, place = piece.num_rows * piece.width, piece.view_of(target)
            if piece.source != position:
                file.seek(header.payload_offset + piece.source * stored.itemsize)
            position = piece.source + count
            if piece.scale == 1.0 and stored.dtype == target.dtype and place.is_contiguous():
                _read_into(file, place.view(-1))
            else:
                values = stored[:count]
                _read_into(file, values)
                place.copy_(scaled[:count].copy_(values).mul_(piece.scale).view(place.shape))
            if not _is_finite(place):
                raise AdapterUnavailable(
                    f"the adapter has values that are not finite in {place.dtype}"
                )
            work.pause()
    finally:  # freed memory keeps its content
        stored.zero_()
        scaled.zero_()


def _read_into(file: FileIO, values: Tensor) -> None:
    raw = values.view(torch.uint8).numpy().data
    while len(raw):
        num_bytes = file.readinto(raw)
        if not num_bytes:
            raise ObjectCorrupt("the block is truncated")
        raw = raw[num_bytes:]


def _is_finite(values: Tensor) -> bool:
    """One pass, fifteen times as fast as `isfinite().all()`: NaN propagates through both
    extremes."""
    low, high = torch.aminmax(values)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _whole_plan(header: BlockHeader, part: LayoutPart) -> BlockPlan:
    return BlockPlan(part.whole, header.ranks, header.auxiliary)


def _pieces(array: _Array) -> Iterator[_Piece]:
    source, target, num_rows, width, columns, stride, scale = array
    if len(columns) == width == stride:
        num_rows, width, stride = 1, num_rows * width, num_rows * width
        columns = range(width)
    if len(columns) == width <= PIECE_ELEMENTS:
        step = PIECE_ELEMENTS // width
        for row in range(0, num_rows, step):
            rows = min(step, num_rows - row)
            yield _Piece(source + row * width, target + row * stride, rows, width, stride, scale)
        return
    for row in range(num_rows):
        begin, place = source + row * width + columns.start, target + row * stride
        for offset in range(0, len(columns), PIECE_ELEMENTS):
            count = min(PIECE_ELEMENTS, len(columns) - offset)
            yield _Piece(begin + offset, place + offset, 1, count, count, scale)


def _arrays(file: WeightedFile, part: LayoutPart, plan: BlockPlan) -> list[_Array]:
    """The arrays of a file in their order there. `plan`: of the block that is filled."""
    whole = _whole_plan(file.header, part)
    arrays = [
        array
        for index in plan.ranks
        if index in file.header.ranks
        for array in _matrices(file, part, index, whole.table[index], plan.table[index])
    ]
    held = [each for each in whole.placed_auxiliary if part.extra_part(each.extra) is not None]
    for stored, placed in zip(held, plan.placed_auxiliary, strict=True):
        arrays.append(_extra_array(stored, placed, part))
    return sorted(arrays, key=lambda array: array.source)


def _matrices(
    file: WeightedFile,
    part: LayoutPart,
    index: int,
    stored: npt.NDArray[np.int64],
    placed: npt.NDArray[np.int64],
) -> Iterator[_Array]:
    """A and B of one slice. `stored`, `placed`: its entries in the tables of file and block."""
    whole, (inputs, outputs) = part.whole.slices[index], part.range_of(index)
    (a_source, b_source, rank), (a_target, b_target, block_rank) = stored.tolist(), placed.tolist()
    first = file.first_rows.get(index, 0)
    width, stride = whole.in_features, len(inputs)
    whole_rows = ((rank * whole.num_experts, file.header.scales[index]),)
    row_scales = file.header.row_scales.get(index, whole_rows)
    is_embedding = whole.kind is SliceKind.EMBEDDING
    if is_embedding:  # A is stored by token
        yield _Array(
            a_source + inputs.start * rank,
            a_target + first,
            len(inputs),
            rank,
            range(rank),
            block_rank,
            1.0,
        )
    for rows, row in _row_groups(part.experts_of(index), rank, first, block_rank):
        if not is_embedding:
            a_start = a_source + rows.start * width
            yield _Array(a_start, a_target + row * stride, len(rows), width, inputs, stride, 1.0)
        for run, scale in _runs(row_scales, rows):
            yield _Array(
                b_source + run.start * whole.out_features,
                b_target + (row + run.start - rows.start) * len(outputs),
                len(run),
                whole.out_features,
                outputs,
                len(outputs),
                scale * file.weight,
            )


def _row_groups(
    experts: range, rank: int, first: int, block_rank: int
) -> Iterator[tuple[range, int]]:
    """The rows of A and B in a file that are adjacent in the block too, and where they begin there.

    `first`: of the `block_rank` rows of an expert, the first that is the file's.
    """
    if rank == block_rank:
        yield range(experts.start * rank, experts.stop * rank), 0
        return
    for number, expert in enumerate(experts):
        yield range(expert * rank, (expert + 1) * rank), number * block_rank + first


def _runs(row_scales: Iterable[tuple[int, float]], held: range) -> Iterator[tuple[range, float]]:
    """The held rows that have the same scale, and the scale."""
    start = 0
    for num_rows, scale in row_scales:
        rows = range(max(start, held.start), min(start + num_rows, held.stop))
        if rows:
            yield rows, scale
        start += num_rows


def _extra_array(stored: PlacedExtra, placed: PlacedExtra, part: LayoutPart) -> _Array:
    shape = stored.extra.shape
    if shape == placed.extra.shape:
        size = stored.extra.num_elements
        return _Array(stored.offset, placed.offset, 1, size, range(size), size, 1.0)
    rows, columns = part.extra_range(stored.extra)
    source = stored.offset + rows.start * shape[-1]
    return _Array(source, placed.offset, len(rows), shape[-1], columns, len(columns), 1.0)
