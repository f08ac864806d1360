"""The LoRA op on the CPU for decoding tokens of many adapters: the compact window of half dtypes.

In bf16 oneDNN sets up each call again, which takes longer than the arithmetic of a decoding step
with few tokens of many adapters. The window needs only one matmul over the A matrices of all active
adapters, a selection, and one matmul per slice over their B matrices. For a 1.1 B Llama in bf16
with 16 tokens of 8 rank-16 adapters, on two cores with AMX, it took 22.6 ms per step, where
`LoraSegments` took 80 ms. In fp32, where a call takes a few microseconds, segments are faster: for
six layers with 16 tokens of 12 rank-8 adapters, one core of an AMD EPYC, the window took 22 ms in
addition to the base's 70 ms, and segments 13 ms.

Overflow of one adapter cannot reach another adapter's tokens in the window. Token t's products with
other adapters' A rows may be Inf or NaN, but the selection replaces them by zero. Zero times
another adapter's B row is zero, because the window's B rows are finite. And t's own Inf or NaN,
from its x, its A or its sums, stays in row t of a matmul.

The window is a copy, so a budget bounds all windows together. Adapters that do not fit, or whose
size would slow down everyone's matmul, are computed one by one from the arena. A new adapter is
computed this way in its first step and joins the window in its second. With hundreds of cold
adapters that computed one token each, joining took a fifth of the engine's time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .lora_batch import ActiveAdapter
from .lora_matrices import Entries, entries_of, slice_b, stacked_a
from .lora_weights import AdapterWeights, CopyBudget

NO_OWNER = -2
"""Owner of a dead window row: no token's row, not even the base's."""
REBUILD_COST = 2
"""Copying a row into the window costs about as much as this many steps of carrying it idly."""

MAX_MEMBER_ROWS = 256
"""Every token is multiplied by every row of the window, and a member is copied within a step:
adapters with more rows of A in a projection stay outside."""


def _expand(h: Tensor, y: Sequence[Tensor], flat: Tensor, entries: Entries) -> None:
    """Add each slice's part of h, multiplied by its B, to its part of y `[tokens, out]`."""
    start = 0
    for part, entry in zip(y, entries, strict=True):
        if rank := entry[2]:
            own = h if rank == h.shape[1] else h[:, start : start + rank]
            part.addmm_(own, slice_b(flat, entry, part.shape[1]))
            start += rank


@dataclass(frozen=True, slots=True)
class _Member:
    """The position of one adapter in the window."""

    generation: int
    a_rows: slice
    b_rows: tuple[slice, ...]
    """By slice of the projection."""

    @property
    def num_rows(self) -> int:
        return int(self.a_rows.stop - self.a_rows.start)


class LoraWindow:
    """The active adapters' matrices of one projection, packed for one matmul each way.

    The A rows of all members are contiguous, an adapter's slices together. For each slice, so are
    the B rows, with the number of the A row (column of h) of each. An adapter that is active for
    the second step in a row is appended if the budget has room for it. An inactive adapter stays
    until carrying its idle rows has cost as much as repacking. Members are copies, identified by
    (row, generation), so a row that was given to another adapter is never mistaken for the old one.
    """

    def __init__(
        self,
        first_slice: int,
        in_features: int,
        slice_outs: tuple[int, ...],
        *,
        dtype: torch.dtype,
        budget: CopyBudget | None = None,
    ) -> None:
        """`budget`: the limit of all windows together; None: no limit."""
        self._budget = budget
        self._first_slice = first_slice
        self._in_features = in_features
        self._slice_outs = slice_outs
        self._a = _GrowingRows((in_features,), dtype)
        self._owners = _GrowingRows((), torch.int32)
        self._b = [_GrowingRows((out_features,), dtype) for out_features in slice_outs]
        self._h_columns = [_GrowingRows((), torch.int64) for _ in slice_outs]
        self._members: dict[int, _Member] = {}
        self._active: tuple[ActiveAdapter, ...] | None = None
        self._newcomers: frozenset[ActiveAdapter] = frozenset()
        """Adapters in `_active` that were not active in the previous step and are not members."""
        self._outside: tuple[ActiveAdapter, ...] = ()
        """The others of `_active` that are no members."""
        self._num_active_rows = 0
        self._idle_cost = 0

    @property
    def num_rows(self) -> int:
        """Rows of A in the window, idle ones included."""
        return self._a.num_rows

    @property
    def num_bytes(self) -> int:
        """The memory of the window."""
        return sum(rows.num_bytes for rows in self._all_rows())

    def add(
        self,
        x: Tensor,
        y: Tensor,
        weights: AdapterWeights,
        token_rows: Tensor,
        adapters: tuple[ActiveAdapter, ...],
    ) -> None:
        """Add the delta of each token's own adapter to y, in place.

        x `[num_tokens, in_features]`; y `[num_tokens, sum of outs]`; token_rows int32
        `[num_tokens]`, each -1 or the row of one of `adapters`.
        """
        self._activate(adapters, weights)
        for adapter in (*self._newcomers, *self._outside):
            self._add_alone(x, y, weights, token_rows, adapter.row)
        if not self._num_active_rows:
            return
        h = x @ self._a.rows.T  # [num_tokens, rows of A]
        h.masked_fill_(self._owners.rows != token_rows[:, None], 0)
        start = 0
        for b, columns, out_features in zip(
            self._b, self._h_columns, self._slice_outs, strict=True
        ):
            if b.num_rows:
                own = h if b.num_rows == self.num_rows else h.index_select(1, columns.rows)
                y[:, start : start + out_features].addmm_(own, b.rows)
            start += out_features

    def forget(self, row: int) -> None:
        """Remove this table row's adapter from the window, if it is a member.

        Its values are zeroed at once, or handed to the budget and zeroed outside the steps; until
        then they are dead rows, which no token reaches.
        """
        for values in self._drop(row):
            if self._budget is None:
                values.zero_()
            else:
                self._budget.discard(values)

    def _drop(self, row: int) -> Sequence[Tensor]:
        """Make a member's rows dead; return their values."""
        member = self._members.pop(row, None)
        if member is None:
            return ()
        self._active = None
        self._owners.rows[member.a_rows] = NO_OWNER
        parts = zip((self._a, *self._b), (member.a_rows, *member.b_rows), strict=True)
        return [rows.mark_dead(part) for rows, part in parts]

    def _add_alone(
        self, x: Tensor, y: Tensor, weights: AdapterWeights, token_rows: Tensor, row: int
    ) -> None:
        """The same for the tokens of one adapter, from the arena."""
        entries = entries_of(weights, row, self._first_slice, len(self._slice_outs))
        a = stacked_a(weights.flat, entries, self._in_features)
        tokens = (token_rows == row).nonzero().flatten()
        own = y[tokens]
        _expand(x[tokens] @ a.T, own.split(self._slice_outs, dim=1), weights.flat, entries)
        y[tokens] = own

    def _activate(self, adapters: tuple[ActiveAdapter, ...], weights: AdapterWeights) -> None:
        if adapters != self._active or self._newcomers:
            known = {*(self._active or ()), *filter(self._is_member, adapters)}
            self._newcomers = frozenset(adapters) - known
            self._drop_strangers(adapters)
            self._join(adapters, weights)
        num_idle = self.num_rows - self._num_active_rows
        num_outside = sum(self._count_rows(weights, adapter.row) for adapter in self._outside)
        num_packed = self._num_active_rows + num_outside
        if not num_idle or not num_packed:
            return
        self._idle_cost += num_idle + num_outside
        if self._idle_cost > REBUILD_COST * num_packed:
            self._clear()
            self._join(adapters, weights)

    def _drop_strangers(self, adapters: tuple[ActiveAdapter, ...]) -> None:
        """Zero and drop members whose row was given to one of these adapters."""
        for adapter in adapters:
            if not self._is_member(adapter):
                for values in self._drop(adapter.row):
                    values.zero_()

    def _is_member(self, adapter: ActiveAdapter) -> bool:
        member = self._members.get(adapter.row)
        return member is not None and member.generation == adapter.generation

    def _join(self, adapters: tuple[ActiveAdapter, ...], weights: AdapterWeights) -> None:
        """Append the adapters that are not new, as far as there is room."""
        outside = []
        for adapter in adapters:
            if adapter in self._newcomers or self._is_member(adapter):
                continue
            if self._make_room(self._ranks(weights, adapter.row)):
                self._members[adapter.row] = self._append(adapter, weights)
            else:
                outside.append(adapter)
        self._active, self._outside = adapters, tuple(outside)
        members = filter(self._is_member, adapters)
        self._num_active_rows = sum(self._members[adapter.row].num_rows for adapter in members)

    def _ranks(self, weights: AdapterWeights, row: int) -> list[int]:
        """The ranks of an adapter, by slice of the projection."""
        entries = entries_of(weights, row, self._first_slice, len(self._slice_outs))
        return [entry[2] for entry in entries]

    def _count_rows(self, weights: AdapterWeights, row: int) -> int:
        """Rows of A that an outsider would join with; those that are too large never do."""
        num_rows = sum(self._ranks(weights, row))
        return num_rows if num_rows <= MAX_MEMBER_ROWS else 0

    def _make_room(self, ranks: Sequence[int]) -> bool:
        """Reserve memory for one more member's rows; False if it is too large or there is no
        memory."""
        num_rows = sum(ranks)
        if num_rows > MAX_MEMBER_ROWS:
            return False
        wanted = [(self._a, num_rows), (self._owners, num_rows)]
        for rows, rank in zip(self._b, ranks, strict=True):
            wanted.append((rows, rank))
        for rows, rank in zip(self._h_columns, ranks, strict=True):
            wanted.append((rows, rank))
        for is_generous in (True, False):
            growth = [(rows, rows.capacity_for(more, is_generous)) for rows, more in wanted]
            num_bytes = sum(rows.bytes_of(capacity) - rows.num_bytes for rows, capacity in growth)
            if self._budget is None or self._budget.take(num_bytes):
                for rows, capacity in growth:
                    rows.grow(capacity)
                return True
        return False

    def _append(self, adapter: ActiveAdapter, weights: AdapterWeights) -> _Member:
        entries = entries_of(weights, adapter.row, self._first_slice, len(self._slice_outs))
        a_rows = self._a.append(stacked_a(weights.flat, entries, self._in_features))
        self._owners.append(torch.full((a_rows.stop - a_rows.start,), adapter.row))
        b_rows, start = [], a_rows.start
        for index, entry in enumerate(entries):
            b = slice_b(weights.flat, entry, self._slice_outs[index])
            # Already finite, or the upload would have been refused. But the isolation of all
            # tenants in this matmul depends on it, so ensure it.
            b_rows.append(self._b[index].append(torch.nan_to_num(b)))
            self._h_columns[index].append(torch.arange(start, start + entry[2]))
            start += entry[2]
        return _Member(adapter.generation, a_rows, tuple(b_rows))

    def _clear(self) -> None:
        num_bytes = self.num_bytes
        for rows in self._all_rows():
            rows.clear()
        if self._budget is not None:
            self._budget.give_back(num_bytes)
        self._members.clear()
        self._idle_cost = 0

    def _all_rows(self) -> Sequence[_GrowingRows]:
        return (self._a, self._owners, *self._b, *self._h_columns)


class _GrowingRows:
    """A tensor that rows are appended to."""

    def __init__(self, row_shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._row_shape = row_shape
        self._dtype = dtype
        self._buffer = self._allocate(0)
        self._dead: list[slice] = []
        self.num_rows = 0

    @property
    def rows(self) -> Tensor:
        return self._buffer[: self.num_rows]

    @property
    def num_bytes(self) -> int:
        return self.bytes_of(self._buffer.shape[0])

    def bytes_of(self, capacity: int) -> int:
        """The bytes of this number of rows."""
        return capacity * math.prod(self._row_shape) * self._dtype.itemsize

    def capacity_for(self, num_more: int, is_generous: bool) -> int:
        """The number of rows to allocate for this many more; generous: twice the present number."""
        needed, capacity = self.num_rows + num_more, int(self._buffer.shape[0])
        if needed <= capacity:
            return capacity
        return max(needed, 2 * self.num_rows) if is_generous else needed

    def append(self, rows: Tensor) -> slice:
        """Copy these rows to the end, which has room, and return their position."""
        added = slice(self.num_rows, self.num_rows + rows.shape[0])
        self._buffer[added] = rows
        self.num_rows = added.stop
        return added

    def mark_dead(self, part: slice) -> Tensor:
        """Mark these rows dead; the caller zeroes the returned values."""
        self._dead.append(part)
        return self._buffer[part]

    def clear(self) -> None:
        """Zero all rows and give their memory back."""
        self.rows.zero_()
        self._dead.clear()
        self._buffer = self._allocate(0)
        self.num_rows = 0

    def grow(self, capacity: int) -> None:
        """Grow to this number of rows; a smaller number has no effect."""
        if capacity <= self._buffer.shape[0]:
            return
        grown = self._allocate(capacity)
        grown[: self.num_rows] = self.rows
        for part in self._dead:
            grown[part] = 0  # it may not have been zeroed yet, and this copy has no other owner
        self.rows.zero_()
        self._buffer = grown

    def _allocate(self, capacity: int) -> Tensor:
        # A tensor born in inference mode could not be written outside of it, by `forget`.
        with torch.inference_mode(mode=False):
            return torch.empty(capacity, *self._row_shape, dtype=self._dtype)
