"""The device memory for adapters: one array, one extent per adapter, two tables of rows.

Kernels read `flat` through `table` and `vectors`, so loading and evicting adapters changes no
tensor's address. Free extents hold zeros, and free rows lead to nothing. A row is never reused with
the same generation, so comparing (row, generation, key) cannot confuse two adapters.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .block import ALIGNMENT_ELEMENTS, VECTOR_KINDS, ExtraKind, PlacedExtra
from .block_reader import PIECE_ELEMENTS
from .extents import Extent, ExtentAllocator, Placement
from .host_cache import HostBlock
from .identity import AdapterKey
from .layout import BaseLayout
from .loaders import UNPACED, Pace, Paced
from .untouched import give_back, untouched_zeros

INITIAL_ROWS = 16
CUDA_TABLE_BYTES = 2 << 20
"""Bytes of the first table on CUDA, and of the first table of vectors. Captured graphs read the
tables at their addresses, so longer ones invalidate them while requests wait."""
CUDA_PIECE_ELEMENTS = 4 << 20
NO_VECTOR = -1
"""In the table of vectors: the adapter has no vector of this kind for the slice."""

SliceEntry = tuple[int, int, int]
"""(a_offset, b_offset, rank) of one slice: absolute element offsets; rank 0 is "not touched"."""

RowAuxiliary = Mapping[int, tuple[PlacedExtra, ...]]
"""Slice index to the extras that an adapter holds for it; offsets into `Arena.flat`."""


@dataclass
class _Occupant:
    """The adapter of a row."""

    key: AdapterKey
    generation: int
    extent: Extent
    entries: npt.NDArray[np.int64]
    """`[num_slices, 3]`: one SliceEntry for each slice."""
    auxiliary: RowAuxiliary
    vocab_size: int | None
    """See `BlockPlan.vocab_size`."""


class Arena:
    """Adapters on the device.

    Loader threads call `copy_into`, `copy_between` and `erase`, one owner everything else.
    """

    flat: Tensor
    """`[reserved]` of the serving type: every adapter's matrices, in the first or the last
    `capacity` elements."""
    table: Tensor
    """`int64 [num_rows, num_slices, 3]` on the device: a SliceEntry for each slice of the base. It
    is replaced by a longer tensor when rows run out, so read it again in every step."""
    vectors: Tensor
    """`int64 [num_rows, num_slices, 3]` on the device: the offset in `flat` of each of
    `VECTOR_KINDS`, or `NO_VECTOR`. It is replaced together with `table`."""
    row_tables: list[list[SliceEntry]]
    """The same rows on the host, as Python numbers."""
    row_auxiliary: list[RowAuxiliary]
    """The auxiliary tensors of each row's adapter that change slices of the base."""
    replacing_rows: set[int]
    """The published rows whose adapters replace a matrix of the base or rows of it: they hold
    auxiliary tensors that are not `vectors`."""
    row_vocabularies: dict[int, int]
    """The published rows whose adapters have another number of tokens than the base, with that
    number."""
    row_heads: dict[int, PlacedExtra]
    """The classification heads of the published rows whose adapters have one."""
    row_draft_heads: dict[int, PlacedExtra]
    """The draft heads of the published rows whose adapters have one."""
    row_bytes: dict[int, int]
    """The bytes of the adapter of each placed row."""
    published: dict[int, tuple[AdapterKey, int]]
    """The adapter and generation of each published row: the only rows that steps may use."""

    def __init__(
        self,
        layout: BaseLayout,
        capacity_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        pace: Pace = UNPACED,
        reserved_bytes: int = 0,
        memory: Tensor | None = None,
    ) -> None:
        """`pace`: the share of a core that copying and zeroing may use while steps run.
        `reserved_bytes`: address space up to which the arena can grow, if more than its capacity.
        Only on the CPU, where it takes memory once it is written to. `memory`: uint8, zeros.
        The arena lies at its end, and can grow up to its beginning. Others have the rest, and leave
        zeros there."""
        self._pace = pace
        self._extents = ExtentAllocator(
            capacity_bytes // dtype.itemsize, alignment=ALIGNMENT_ELEMENTS
        )
        self._has_end = memory is not None
        most_bytes = reserved_bytes if memory is None else memory.nbytes
        most = most_bytes // dtype.itemsize // ALIGNMENT_ELEMENTS * ALIGNMENT_ELEMENTS
        self.reserved = max(most, self._extents.capacity)
        """The largest capacity, in elements."""
        self.flat = _zeros(self.reserved, dtype, device) if memory is None else memory.view(dtype)
        self.on_remove: list[Callable[[int], None]] = []
        """Called with each removed row. Who holds copies of the row's values zeroes them."""
        self._occupants: dict[int, _Occupant] = {}  # by row
        self.row_bytes = {}
        self.published = {}
        num_rows = initial_rows(len(layout.slices), device)
        self._generations = [0] * num_rows
        self._free_rows = list(range(num_rows))  # heap: low rows first keep the table short
        self._cuda = _CudaCopies(device, pace) if device.type == "cuda" else None
        self._untouched: list[SliceEntry] = [(0, 0, 0)] * len(layout.slices)
        self.row_tables = [self._untouched] * num_rows
        self.row_auxiliary = [{}] * num_rows
        self.replacing_rows = set()
        self.row_vocabularies = {}
        self.row_heads = {}
        self.row_draft_heads = {}
        size = (num_rows, len(layout.slices), 3)
        self.table = torch.zeros(size, dtype=torch.int64, device=device)
        self.vectors = torch.full(size, NO_VECTOR, dtype=torch.int64, device=device)

    @property
    def capacity(self) -> int:
        """In elements."""
        return self._extents.capacity

    @property
    def num_free(self) -> int:
        """Elements, in however many runs."""
        return self._extents.num_free

    @property
    def largest_free(self) -> int:
        """Elements of the largest free run."""
        return self._extents.largest_free

    @property
    def element_bytes(self) -> int:
        return self.flat.itemsize

    @property
    def capacity_bytes(self) -> int:
        return self._extents.capacity * self.flat.itemsize

    @property
    def used_bytes(self) -> int:
        return self._extents.used * self.flat.itemsize

    def resize(self, capacity: int) -> None:
        """Grow or shrink at the end, which must be free. Freed bytes go back to the system, or to
        the others who have the rest of the memory: as zeros."""
        assert capacity <= self.reserved
        old = self.capacity
        self._extents.resize(capacity)
        if self._has_end:
            if self._cuda is not None:  # it has zeroed what others had
                self._cuda.follow_current_stream()
        elif self.capacity < old:
            give_back(self.flat[self.capacity : old])

    def place(
        self,
        key: AdapterKey,
        num_elements: int,
        block_table: npt.NDArray[np.int64],
        auxiliary: Sequence[PlacedExtra] = (),
        *,
        vocab_size: int | None = None,
        avoid: Sequence[Extent] = (),
    ) -> Placement | None:
        """Reserve a row, and an extent outside of `avoid`, for a block of this table and extras.

        `vocab_size`: see `BlockPlan`. The row stays invisible until `publish`. None if no free run
        is large enough.
        """
        extent = self._extents.allocate(num_elements, avoid=avoid)
        if extent is None:
            return None
        placement = self._take_row(extent)
        self._occupy(placement, key, block_table, auxiliary, vocab_size)
        return placement

    def place_again(self, row: int, *, avoid: Sequence[Extent] = ()) -> Placement | None:
        """Allocate a new extent and row to which a published row can be moved.

        None if no free extent is large enough.
        """
        occupant = self._occupants[row]
        extent = self._extents.allocate(occupant.extent.size, avoid=avoid)
        if extent is None:
            return None
        placement = self._take_row(extent)
        self._occupy_again(placement, occupant)
        return placement

    def _take_row(self, extent: Extent) -> Placement:
        """A free row's next generation for this extent."""
        if not self._free_rows:
            self._double_rows()
        row = heapq.heappop(self._free_rows)
        return Placement(row, self._generations[row] + 1, extent)

    def _occupy(
        self,
        placement: Placement,
        key: AdapterKey,
        block_table: npt.NDArray[np.int64],
        auxiliary: Sequence[PlacedExtra],
        vocab_size: int | None,
    ) -> None:
        """Note the adapter of a place, whose row is invisible until `publish`."""
        offset = self._start(placement.extent)
        entries = block_table + np.array([offset, offset, 0])
        entries[block_table[:, 2] == 0] = 0
        self._hold(placement, key, entries, _by_slice(auxiliary, offset), vocab_size)

    def _occupy_again(self, placement: Placement, occupant: _Occupant) -> None:
        """Note a place to which this row's adapter can be moved."""
        shift = self._start(placement.extent) - self._start(occupant.extent)
        entries = occupant.entries + np.array([shift, shift, 0])
        entries[entries[:, 2] == 0] = 0
        moved = {
            index: tuple(placed.moved(shift) for placed in auxiliary)
            for index, auxiliary in occupant.auxiliary.items()
        }
        self._hold(placement, occupant.key, entries, moved, occupant.vocab_size)

    def _hold(
        self,
        placement: Placement,
        key: AdapterKey,
        entries: npt.NDArray[np.int64],
        auxiliary: RowAuxiliary,
        vocab_size: int | None,
    ) -> None:
        row, generation, extent = placement
        self._generations[row] = generation
        self._occupants[row] = _Occupant(key, generation, extent, entries, auxiliary, vocab_size)
        self.row_bytes[row] = extent.size * self.flat.itemsize

    def copy_into(self, placement: Placement, block: HostBlock) -> None:
        """Copy a block into its extent; the bytes are on the device when this returns.

        Runs in a loader thread while the owner's steps run: in pieces, without the GIL.
        """
        self._copy(self._part(placement.extent, block.num_elements), block.tensor)

    def copy_between(self, source: Placement, target: Placement) -> None:
        """Copy one extent to another. Runs in a loader thread, like `copy_into`."""
        self._copy(self._part(target.extent), self._part(source.extent))

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if self._cuda is not None:
            self._cuda.copy(target, source)
            return
        work = Paced(self._pace)
        for piece in _pieces(source.numel(), PIECE_ELEMENTS):
            target[piece].copy_(source[piece])
            work.pause()

    def _part(self, extent: Extent, size: int | None = None) -> Tensor:
        start = self._start(extent)
        return self.flat[start : start + (extent.size if size is None else size)]

    def _start(self, extent: Extent) -> int:
        """Where it begins in `flat`: at the end of a memory the first extent is the last one."""
        return self.reserved - extent.end if self._has_end else extent.offset

    def publish(self, placement: Placement) -> None:
        """Make a copied block visible in the table."""
        occupant = self._occupants[placement.row]
        assert occupant.generation == placement.generation
        self.published[placement.row] = (occupant.key, occupant.generation)
        self.row_tables[placement.row] = [(a, b, rank) for a, b, rank in occupant.entries.tolist()]
        self._write_row(self.table, placement.row, occupant.entries)
        if occupant.auxiliary:
            self._publish_auxiliary(placement.row, occupant.auxiliary)
        if occupant.vocab_size is not None:
            self.row_vocabularies[placement.row] = occupant.vocab_size

    def classification_head(self, row: int) -> Tensor | None:
        """`[labels, hidden_size]` of a published row's adapter; None if it has none. It may be read
        while the adapter is leased."""
        return self._values(self.row_heads.get(row))

    def draft_head(self, row: int) -> Tensor | None:
        """`[values]` of a published row's adapter, likewise."""
        return self._values(self.row_draft_heads.get(row))

    def _values(self, placed: PlacedExtra | None) -> Tensor | None:
        if placed is None:
            return None
        values = self.flat[placed.offset : placed.offset + placed.extra.num_elements]
        return values.view(placed.extra.shape)

    def _publish_auxiliary(self, row: int, auxiliary: RowAuxiliary) -> None:
        vectors = np.full(self.vectors.shape[1:], NO_VECTOR, dtype=np.int64)
        changing: dict[int, tuple[PlacedExtra, ...]] = {}
        for placed in chain.from_iterable(auxiliary.values()):
            if placed.extra.kind is ExtraKind.CLASSIFICATION_HEAD:
                self.row_heads[row] = placed
                continue
            if placed.extra.kind is ExtraKind.DRAFT_HEAD:
                self.row_draft_heads[row] = placed
                continue
            index = placed.extra.slice_index
            changing[index] = (*changing.get(index, ()), placed)
            if placed.extra.kind in VECTOR_KINDS:
                kind = VECTOR_KINDS.index(placed.extra.kind)
                vectors[placed.extra.slice_index, kind] = placed.offset
            else:
                self.replacing_rows.add(row)
        self.row_auxiliary[row] = changing
        self._write_row(self.vectors, row, vectors)

    def retire(self, placement: Placement) -> None:
        """Make a row invisible, published or not; `erase` and `free` follow.

        The caller ensures that no copy into the extent and no step that reads it is running.
        """
        occupant = self._occupants[placement.row]
        assert occupant.generation == placement.generation
        for forget in self.on_remove:
            forget(placement.row)
        if self.published.pop(placement.row, None):
            self.row_tables[placement.row] = self._untouched
            self.row_auxiliary[placement.row] = {}
            self.replacing_rows.discard(placement.row)
            self.row_vocabularies.pop(placement.row, None)
            self.row_heads.pop(placement.row, None)
            self.row_draft_heads.pop(placement.row, None)
            self.table[placement.row].zero_()
            self.vectors[placement.row].fill_(NO_VECTOR)
        if self._cuda is not None:
            self._cuda.follow_current_stream()

    def erase(self, placement: Placement) -> None:
        """Zero a retired extent.

        Runs in a loader thread while the owner's steps run, in pieces.
        """
        target = self._part(placement.extent)
        if self._cuda is not None:
            self._cuda.erase(target)
            return
        work = Paced(self._pace)
        for piece in _pieces(target.numel(), PIECE_ELEMENTS):
            target[piece].zero_()
            work.pause()

    def free(self, placement: Placement) -> None:
        """Make an erased extent and its row available for reuse."""
        self._let_go(placement)
        self._extents.free(placement.extent)
        heapq.heappush(self._free_rows, placement.row)

    def _let_go(self, placement: Placement) -> None:
        """Forget the adapter of an invisible row."""
        occupant = self._occupants.pop(placement.row)
        assert occupant.generation == placement.generation
        assert placement.row not in self.published
        del self.row_bytes[placement.row]

    def _write_row(self, table: Tensor, row: int, values: npt.NDArray[np.int64]) -> None:
        host = torch.from_numpy(values)
        if self._cuda is not None:
            host = host.pin_memory()  # so that the copy waits for no running kernel
        table[row].copy_(host, non_blocking=True)

    def _double_rows(self) -> None:
        num_rows = len(self._generations)
        self.table = torch.cat([self.table, torch.zeros_like(self.table)])
        self.vectors = torch.cat([self.vectors, torch.full_like(self.vectors, NO_VECTOR)])
        self.row_tables = self.row_tables + [self._untouched] * num_rows
        self.row_auxiliary = self.row_auxiliary + [{}] * num_rows
        self._generations += [0] * num_rows
        self._free_rows = list(range(num_rows, 2 * num_rows))


def initial_rows(num_slices: int, device: torch.device) -> int:
    """Number of rows of the first table, for a base with this number of slices."""
    if device.type == "cpu":
        return INITIAL_ROWS
    return max(INITIAL_ROWS, CUDA_TABLE_BYTES // (num_slices * 3 * torch.int64.itemsize))


def _by_slice(auxiliary: Sequence[PlacedExtra], start: int) -> RowAuxiliary:
    by_slice: dict[int, tuple[PlacedExtra, ...]] = {}
    for placed in auxiliary:
        index = placed.extra.slice_index
        by_slice[index] = (*by_slice.get(index, ()), placed.moved(start))
    return by_slice


def _zeros(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return untouched_zeros(num_elements, dtype)
    return torch.zeros(num_elements, dtype=dtype, device=device)


class _CudaCopies:
    """Copies and zeroes on a separate stream, after all steps that used the bytes."""

    def __init__(self, device: torch.device, pace: Pace) -> None:
        self._pace = pace
        self._stream = torch.cuda.Stream(device)
        self._steps = torch.cuda.Event()
        self.follow_current_stream()

    def follow_current_stream(self) -> None:
        """Order later work after all work that the current stream has so far."""
        self._steps.record(torch.cuda.current_stream(self._stream.device))

    def copy(self, target: Tensor, source: Tensor) -> None:
        def copy_piece(piece: slice) -> None:
            target[piece].copy_(source[piece], non_blocking=True)

        self._run(source.numel(), copy_piece)

    def erase(self, target: Tensor) -> None:
        self._run(target.numel(), lambda piece: target[piece].zero_())

    def _run(self, num_elements: int, work: Callable[[slice], object]) -> None:
        """Piece by piece: wait for the end of each, and rest as the pace wants."""
        for piece in _pieces(num_elements, CUDA_PIECE_ELEMENTS):
            begun_at = time.monotonic()
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._steps)
                work(piece)
                # Blocking sleeps; a spinning wait would take a core.
                done = torch.cuda.Event(blocking=True)
                done.record()
            done.synchronize()
            self._pace.rest(time.monotonic() - begun_at)


def _pieces(num_elements: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, num_elements, size))
