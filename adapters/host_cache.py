"""Host memory cache of blocks that are ready to be copied to the device.

Reading a block folds each slice's scale into B in fp32 and rounds once to the serving dtype. All
blocks are in one pool that is allocated at start, so the bound in bytes is exact and loading
allocates no memory. Bytes are zeroed before they are free again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .block import (
    ALIGNMENT_ELEMENTS,
    BlockHeader,
    BlockPlan,
    ExtraKind,
    PlacedExtra,
    read_block_header,
)
from .byte_shares import Holding, find_surplus
from .errors import AdapterUnavailable, ArenaTooSmall, ObjectCorrupt
from .extents import Extent, ExtentAllocator
from .identity import AdapterKey
from .layout import BaseLayout
from .layout_part import LayoutPart
from .loaders import UNPACED, Pace, Paced
from .untouched import untouched_zeros

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

PIECE_ELEMENTS = 32 << 10
"""Elements converted at a time. They fit into a core's cache, and torch starts no additional
threads for so few, so a load takes at most one core from the running step. After each piece the
loader thread pauses as its pace requires."""

Prepare = Callable[[Tensor, BlockHeader, BlockPlan], None]
"""Changes a block `[num_elements]` in place, in the loader thread that has read it, its scales
folded in. Raises AdapterUnavailable if it cannot be served."""


@dataclass(frozen=True, eq=False)
class HostBlock:
    """One adapter's block in host memory, in the serving dtype."""

    key: AdapterKey
    tensor: Tensor
    """`[num_elements]`, scales folded in; a view of the cache's pool."""
    table: npt.NDArray[np.int64]
    """`BlockPlan.table`: offsets from the start of the block."""
    auxiliary: tuple[PlacedExtra, ...]
    """`BlockPlan.placed_auxiliary`, likewise."""
    extent: Extent

    @property
    def num_elements(self) -> int:
        return self.tensor.numel()


class HostCache:
    """Least-recently-used cache of blocks, bounded in bytes. Every method is thread-safe.

    A block is *in use* from `read` or `acquire` until `release`; only unused blocks are dropped to
    make room. `page_locked` is for CUDA, where copies then run in parallel with kernels; torch
    rounds page-locked sizes up to a power of two.
    """

    def __init__(
        self,
        layout: BaseLayout,
        capacity_bytes: int,
        dtype: torch.dtype,
        *,
        page_locked: bool = False,
        prepare: Prepare | None = None,
        pace: Pace = UNPACED,
        part: LayoutPart | None = None,
    ) -> None:
        """`prepare` converts the auxiliary tensors of a block to their served values; see
        `ExtraKind`. `part`: what the blocks hold of each adapter; None: all.

        `pace`: the share of a core that reading and zeroing may use while the engine's steps run.
        """
        self._prepare = prepare
        self._pace = pace
        self._layout = layout
        self._part = part or LayoutPart(layout)
        self._dtype = dtype
        self._extents = ExtentAllocator(
            capacity_bytes // dtype.itemsize, alignment=ALIGNMENT_ELEMENTS
        )
        self._pool = (
            torch.empty(self._extents.capacity, dtype=dtype, pin_memory=True)
            if page_locked
            else untouched_zeros(self._extents.capacity, dtype)
        )
        self._blocks: OrderedDict[AdapterKey, HostBlock] = OrderedDict()  # oldest use first
        self._in_use: set[AdapterKey] = set()
        self._changed: list[AdapterKey] = []
        self._lock = Lock()
        # Zeroing takes milliseconds, so it happens outside of `_lock`, which the engine's loop
        # takes in every step. Taken before `_lock`, never inside it.
        self._erasing = Lock()

    @property
    def capacity_bytes(self) -> int:
        return self._extents.capacity * self._dtype.itemsize

    @property
    def used_bytes(self) -> int:
        """Bytes of cached blocks and of running reads."""
        return self._extents.used * self._dtype.itemsize

    def size_of(self, key: AdapterKey) -> int:
        """Bytes of a cached block; 0 if it is not here."""
        with self._lock:
            block = self._blocks.get(key)
        return 0 if block is None else block.extent.size * self._dtype.itemsize

    def size_on_disk(self, path: Path) -> int:
        """Bytes of a block's file; 0 if it does not exist."""
        try:
            return path.stat().st_size
        except OSError:
            return 0

    def keys(self) -> list[AdapterKey]:
        with self._lock:
            return list(self._blocks)

    def holds(self, key: AdapterKey) -> bool:
        with self._lock:
            return key in self._blocks

    def acquire(self, key: AdapterKey) -> HostBlock | None:
        """Take a cached block into use; None if it is not here."""
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
                self._in_use.add(key)
            return block

    def release(self, key: AdapterKey) -> None:
        """End the use of a block; it stays cached. Unknown keys are ignored."""
        with self._lock:
            self._in_use.discard(key)

    def read(self, key: AdapterKey, path: Path) -> HostBlock | None:
        """Read a block's file into the cache and take it into use. For a loader thread.

        None if blocks in use leave no room: try again after a `release`. The caller never reads
        a key that the cache holds, nor one key twice at a time.

        Raises ObjectCorrupt if the file is no block of this adapter and base or is truncated,
        ArenaTooSmall if it is larger than the whole cache, AdapterUnavailable if a value is not
        finite in the serving type, OSError.
        """
        header = read_block_header(path)
        plan = self._check(header, key)
        extent = self._reserve(key, plan.num_elements)
        if extent is None:
            return None
        tensor = self._pool[extent.offset : extent.offset + plan.num_elements]
        try:
            with path.open("rb", buffering=0) as file:
                _fill(tensor, file, header, _arrays(header, self._part, plan), Paced(self._pace))
            if self._prepare and plan.auxiliary:
                self._prepare(tensor, header, plan)
        except BaseException:
            with self._erasing:
                self._erase(extent)
            raise
        block = HostBlock(key, tensor, plan.table, plan.placed_auxiliary, extent)
        with self._lock:
            self._blocks[key] = block
            self._in_use.add(key)
            self._changed.append(key)
        return block

    def remove(self, key: AdapterKey) -> None:
        """Drop this adapter's block; none of its bytes are left when this returns. Unknown keys are
        ignored."""
        with self._erasing:
            with self._lock:
                self._in_use.discard(key)
                block = self._blocks.pop(key, None)
                self._changed.append(key)
            if block is not None:
                self._erase(block.extent)

    def take_changed(self) -> list[AdapterKey]:
        """The keys whose blocks came or went since the last call."""
        with self._lock:
            changed, self._changed = self._changed, []
        return changed

    def _check(self, header: BlockHeader, key: AdapterKey) -> BlockPlan:
        if header.digest != key.digest:
            raise ObjectCorrupt("the block belongs to another adapter")
        if header.base_id != self._layout.base_id:
            raise ObjectCorrupt("the block was made for another base model")
        num_slices = len(self._layout.slices)
        if not (header.ranks or header.auxiliary) or not all(
            0 <= index < num_slices and rank > 0 and math.isfinite(header.scales[index])
            for index, rank in header.ranks.items()
        ):
            raise ObjectCorrupt("the block's slices do not exist in this base model")
        if not all(
            sum(num_rows for num_rows, _ in runs)
            == header.ranks[index] * self._layout.slices[index].num_experts
            and all(num_rows > 0 and math.isfinite(scale) for num_rows, scale in runs)
            for index, runs in header.row_scales.items()
            if index in header.ranks
        ):
            raise ObjectCorrupt("the block's factors are not those of its rows")
        if not all(0 <= extra.slice_index < num_slices for extra in header.auxiliary):
            raise ObjectCorrupt("the block's extras belong to no slice of this base model")
        if _whole_plan(header, self._part).num_elements != header.num_elements:
            raise ObjectCorrupt("the block's size does not follow from its ranks")
        extras = tuple(map(self._part.extra_part, header.auxiliary))
        plan = BlockPlan(self._part.layout, header.ranks, extras)
        if plan.num_elements > self._extents.capacity:
            raise ArenaTooSmall(
                f"It needs {plan.num_elements * self._dtype.itemsize} bytes of host memory."
            )
        return plan

    def _reserve(self, key: AdapterKey, num_elements: int) -> Extent | None:
        """Room for a block, made by dropping blocks out of use."""
        with self._erasing:
            while True:
                with self._lock:
                    extent = self._extents.allocate(num_elements)
                    victim = None if extent else self._pop_victim(key, num_elements)
                if victim is None:
                    return extent
                self._erase(victim.extent)

    def _pop_victim(self, newcomer: AdapterKey, num_elements: int) -> HostBlock | None:
        """Blocks of tenants above their share are evicted first, then the least recently used.

        Called with `_lock` held. None if every block is in use.
        """
        surplus = find_surplus(
            [
                Holding(key, block.extent.size, use, key not in self._in_use)
                for use, (key, block) in enumerate(self._blocks.items())
            ],
            capacity=self._extents.capacity,
            active=frozenset(key.tenant_id for key in self._blocks),
            newcomer=newcomer,
            newcomer_size=num_elements,
        )
        out_of_use = [key for key in self._blocks if key not in self._in_use]
        victim = next((key for key in out_of_use if key in surplus.keys), None)
        if victim is None:
            victim = next(iter(out_of_use), None)
        if victim is None:
            return None
        self._changed.append(victim)
        return self._blocks.pop(victim)

    def _erase(self, extent: Extent) -> None:
        """Zero and free an extent. The caller holds `_erasing`, so that no other thread sees a
        block that is partly dropped."""
        target, work = self._pool[extent.offset : extent.end], Paced(self._pace)
        for start in range(0, extent.size, PIECE_ELEMENTS):
            target[start : start + PIECE_ELEMENTS].zero_()
            work.pause()
        with self._lock:
            self._extents.free(extent)


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
    scale: float


class _Piece(NamedTuple):
    """Adjacent elements of the payload that are adjacent in the block too."""

    source: int
    target: int
    num_elements: int
    scale: float


def _fill(
    target: Tensor, file: BinaryIO, header: BlockHeader, arrays: Iterable[_Array], work: Paced
) -> None:
    """Convert what the arrays name of a block's file, piece by piece."""
    stored = torch.empty(PIECE_ELEMENTS, dtype=TORCH_DTYPES[header.dtype])
    scaled = torch.empty(PIECE_ELEMENTS, dtype=torch.float32)
    position = None
    try:
        for source, start, count, scale in chain.from_iterable(map(_pieces, arrays)):
            if source != position:
                file.seek(header.payload_offset + source * stored.itemsize)
            position = source + count
            piece = target[start : start + count]
            if scale == 1.0 and stored.dtype == target.dtype:
                _read_into(file, piece)
            else:
                values = stored[:count]
                _read_into(file, values)
                piece.copy_(scaled[:count].copy_(values).mul_(scale))
            if not _is_finite(piece):
                raise AdapterUnavailable(
                    f"the adapter has values that are not finite in {piece.dtype}"
                )
            work.pause()
    finally:  # freed memory keeps its content
        stored.zero_()
        scaled.zero_()


def _read_into(file: BinaryIO, values: Tensor) -> None:
    raw = values.view(torch.uint8).numpy().data
    while len(raw):
        num_bytes = file.readinto(raw)  # type: ignore[attr-defined]
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
    source, target, num_rows, width, columns, scale = array
    if len(columns) == width:
        num_rows, width, columns = 1, num_rows * width, range(num_rows * width)
    for row in range(num_rows):
        begin, place = source + row * width + columns.start, target + row * len(columns)
        for offset in range(0, len(columns), PIECE_ELEMENTS):
            count = min(PIECE_ELEMENTS, len(columns) - offset)
            yield _Piece(begin + offset, place + offset, count, scale)


def _arrays(header: BlockHeader, part: LayoutPart, plan: BlockPlan) -> list[_Array]:
    """The arrays of a block's file in their order there. `plan`: of the block that is filled."""
    whole = _whole_plan(header, part)
    arrays = [
        array
        for index in header.ranks
        for array in _matrices(header, part, index, whole.table[index], plan.table[index])
    ]
    for stored, placed in zip(whole.placed_auxiliary, plan.placed_auxiliary, strict=True):
        arrays.append(_extra_array(stored, placed, part))
    return sorted(arrays, key=lambda array: array.source)


def _matrices(
    header: BlockHeader,
    part: LayoutPart,
    index: int,
    stored: npt.NDArray[np.int64],
    placed: npt.NDArray[np.int64],
) -> Iterator[_Array]:
    """A and B of one slice. `stored`, `placed`: its entries in the tables of file and block."""
    whole, (inputs, outputs) = part.whole.slices[index], part.range_of(index)
    (a_source, b_source, _), (a_target, b_target, _) = stored.tolist(), placed.tolist()
    total = header.ranks[index] * whole.num_experts
    yield _Array(a_source, a_target, total, whole.in_features, inputs, 1.0)
    for num_rows, scale in header.row_scales.get(index, ((total, header.scales[index]),)):
        yield _Array(b_source, b_target, num_rows, whole.out_features, outputs, scale)
        b_source += num_rows * whole.out_features
        b_target += num_rows * len(outputs)


def _extra_array(stored: PlacedExtra, placed: PlacedExtra, part: LayoutPart) -> _Array:
    kind, shape = stored.extra.kind, stored.extra.shape
    inputs, outputs = part.range_of(stored.extra.slice_index)
    if shape == placed.extra.shape:
        size = stored.extra.num_elements
        return _Array(stored.offset, placed.offset, 1, size, range(size), 1.0)
    if kind is ExtraKind.MATRIX:
        source = stored.offset + outputs.start * shape[1]
        return _Array(source, placed.offset, len(outputs), shape[1], inputs, 1.0)
    return _Array(stored.offset, placed.offset, 1, shape[0], outputs, 1.0)
