"""The LoRA op on the CPU: a compact window for decoding, sorted segments for prefill.

Decoding steps have few tokens of many adapters, so calls cost more than arithmetic: one matmul over
the A matrices of all active adapters, a selection, one matmul per slice over their B matrices. For
a 1.1 B Llama in bf16 with 16 tokens of 8 rank-16 adapters, on two cores with AMX, that took 22.6 ms
a step where segments took 80. In fp32 without AMX the two are about even.

Why adapters cannot reach each other's tokens in the window, whatever they overflow to: token t's
products with foreign A rows may be Inf or NaN, but the selection replaces them by zero; a zero
times a foreign B row is zero because the window's B rows are finite; and t's own Inf or NaN, from
its x, its A or its sums, stays in row t of a matmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .lora_batch import ActiveAdapter, Segment
from .lora_weights import AdapterWeights

NO_OWNER = -2
"""Owner of a dead window row: no token's row, not even the base's."""
REBUILD_COST = 2
"""Copying a row into the window costs about as much as this many steps of carrying it idly."""


def add_segments(
    x: Tensor,
    y: Tensor,
    weights: AdapterWeights,
    segments: tuple[Segment, ...],
    *,
    first_slice: int,
    slice_outs: tuple[int, ...],
) -> None:
    """Add the LoRA delta of one projection to y's rows in these segments.

    x `[num_tokens, in_features]`, y `[num_tokens, sum(slice_outs)]`.
    """
    for segment in segments:
        entries = _entries(weights, segment.row, first_slice, len(slice_outs))
        a = _stacked_a(weights.flat, entries, x.shape[1])
        if a.shape[0]:
            h = x[segment.start : segment.end] @ a.T  # [tokens, sum of ranks]
            _expand(h, y[segment.start : segment.end], weights.flat, entries, slice_outs)


def _expand(
    h: Tensor,
    y: Tensor,
    flat: Tensor,
    entries: Sequence[Sequence[int]],
    slice_outs: tuple[int, ...],
) -> None:
    h_start = y_start = 0
    for entry, out_features in zip(entries, slice_outs, strict=True):
        rank = entry[2]
        if rank:
            b = _b(flat, entry, out_features)
            y[:, y_start : y_start + out_features].addmm_(h[:, h_start : h_start + rank], b)
        h_start += rank
        y_start += out_features


@dataclass(frozen=True, slots=True)
class _Member:
    """Where one adapter lies in the window."""

    generation: int
    a_rows: slice
    b_rows: tuple[slice, ...]
    """By slice of the projection."""

    @property
    def num_rows(self) -> int:
        return int(self.a_rows.stop - self.a_rows.start)


class LoraWindow:
    """The active adapters' matrices of one projection, packed for one matmul each way.

    The A rows of all members lie one under another, an adapter's slices together; for each slice,
    so do the B rows, with the number of the A row (column of h) that each belongs to. An adapter
    that joins is appended. One that leaves stays, in case it comes back, until carrying the idle
    rows has cost as much as packing anew. Members are copies, known by (row, generation): a row
    that was given to another adapter is never taken for the old one.
    """

    def __init__(
        self,
        first_slice: int,
        in_features: int,
        slice_outs: tuple[int, ...],
        *,
        dtype: torch.dtype,
    ) -> None:
        self._first_slice = first_slice
        self._in_features = in_features
        self._slice_outs = slice_outs
        self._a = _GrowingRows((in_features,), dtype)
        self._owners = _GrowingRows((), torch.int32)
        self._b = [_GrowingRows((out_features,), dtype) for out_features in slice_outs]
        self._h_columns = [_GrowingRows((), torch.int64) for _ in slice_outs]
        self._members: dict[int, _Member] = {}
        self._active: tuple[ActiveAdapter, ...] | None = None
        self._num_active_rows = 0
        self._idle_cost = 0

    @property
    def num_rows(self) -> int:
        """Rows of A in the window, idle ones included."""
        return self._a.num_rows

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
        """Zero what the window holds of this table row's adapter, if anything."""
        member = self._members.pop(row, None)
        if member is None:
            return
        self._a.rows[member.a_rows] = 0
        self._owners.rows[member.a_rows] = NO_OWNER
        for b, rows in zip(self._b, member.b_rows, strict=True):
            b.rows[rows] = 0
        self._active = None

    def _activate(self, adapters: tuple[ActiveAdapter, ...], weights: AdapterWeights) -> None:
        if adapters != self._active:
            self._join(adapters, weights)
        self._idle_cost += self.num_rows - self._num_active_rows
        if self._idle_cost > REBUILD_COST * self._num_active_rows:
            self._clear()
            self._join(adapters, weights)

    def _join(self, adapters: tuple[ActiveAdapter, ...], weights: AdapterWeights) -> None:
        for adapter in adapters:
            member = self._members.get(adapter.row)
            if member is None or member.generation != adapter.generation:
                self.forget(adapter.row)
                self._members[adapter.row] = self._append(adapter, weights)
        self._active = adapters
        self._num_active_rows = sum(self._members[adapter.row].num_rows for adapter in adapters)

    def _append(self, adapter: ActiveAdapter, weights: AdapterWeights) -> _Member:
        entries = _entries(weights, adapter.row, self._first_slice, len(self._slice_outs))
        a_rows = self._a.append(_stacked_a(weights.flat, entries, self._in_features))
        self._owners.append(torch.full((a_rows.stop - a_rows.start,), adapter.row))
        b_rows, start = [], a_rows.start
        for index, entry in enumerate(entries):
            b = _b(weights.flat, entry, self._slice_outs[index])
            # Finite already, or the tenant's upload would have been refused; but it is what the
            # isolation of all other tenants in this matmul rests on, so make sure of it.
            b_rows.append(self._b[index].append(torch.nan_to_num(b)))
            self._h_columns[index].append(torch.arange(start, start + entry[2]))
            start += entry[2]
        return _Member(adapter.generation, a_rows, tuple(b_rows))

    def _clear(self) -> None:
        for rows in (self._a, self._owners, *self._b, *self._h_columns):
            rows.clear()
        self._members.clear()
        self._idle_cost = 0


class _GrowingRows:
    """A tensor that rows are appended to. Its memory doubles when full and is used again."""

    def __init__(self, row_shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._row_shape = row_shape
        self._dtype = dtype
        self._buffer = self._allocate(0)
        self.num_rows = 0

    @property
    def rows(self) -> Tensor:
        return self._buffer[: self.num_rows]

    def append(self, rows: Tensor) -> slice:
        """Copy these rows to the end; return where they lie."""
        added = slice(self.num_rows, self.num_rows + rows.shape[0])
        if added.stop > self._buffer.shape[0]:
            self._grow(added.stop)
        self._buffer[added] = rows
        self.num_rows = added.stop
        return added

    def clear(self) -> None:
        """Drop all rows and zero them."""
        self.rows.zero_()
        self.num_rows = 0

    def _grow(self, num_rows: int) -> None:
        grown = self._allocate(max(num_rows, 2 * self.num_rows))
        grown[: self.num_rows] = self.rows
        self.rows.zero_()
        self._buffer = grown

    def _allocate(self, capacity: int) -> Tensor:
        # A tensor born in inference mode could not be written outside of it, by `forget`.
        with torch.inference_mode(mode=False):
            return torch.empty(capacity, *self._row_shape, dtype=self._dtype)


def _entries(
    weights: AdapterWeights, row: int, first_slice: int, num_slices: int
) -> Sequence[Sequence[int]]:
    """(a_offset, b_offset, rank) of each slice of a projection."""
    return weights.row_tables[row][first_slice : first_slice + num_slices]


def _stacked_a(flat: Tensor, entries: Sequence[Sequence[int]], in_features: int) -> Tensor:
    """The A matrices of the touched slices, one under another: `[sum of ranks, in_features]`."""
    num_rows = sum(entry[2] for entry in entries)
    start = next((entry[0] for entry in entries if entry[2]), 0)
    return flat[start : start + num_rows * in_features].view(num_rows, in_features)


def _b(flat: Tensor, entry: Sequence[int], out_features: int) -> Tensor:
    """One slice's B, `[rank, out_features]`."""
    _, start, rank = entry
    return flat[start : start + rank * out_features].view(rank, out_features)
