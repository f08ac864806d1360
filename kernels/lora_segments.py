"""The LoRA op on the CPU by segments: each adapter's matrices are read from the arena.

A segment is multiplied by its adapter's A, and for each slice by its B. With few rows per segment,
as in decoding, the number of calls determines the cost beyond reading the matrices. Therefore the
views of an adapter's matrices are cached. In fp32, one or two rows are multiplied as separate
vectors, because MKL distributes even the smallest matrix product over its threads. For 16 tokens of
12 rank-8 adapters, one layer of a Llama of 1.1 B, one thread on an AMD EPYC, this took 1.3 ms,
compared with 1.85 ms for new views and matrix products; reading the bytes takes 0.5 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .lora_batch import Segment
from .lora_matrices import entries_of, slice_b, stacked_a
from .lora_weights import AdapterWeights

MAX_ROWS_ALONE = 2
"""Segments of up to this many rows are multiplied row by row. From three rows on, matrix products
are not slower."""
MIN_KEPT_ADAPTERS = 64
"""The number of adapters whose views are cached, or a step's number if that is larger. The views
take about 3.5 kB per adapter and projection, which would be too much for all adapters of a large
arena."""


@dataclass(frozen=True, slots=True)
class _SliceMatrices:
    """An adapter's matrices for one slice that it changes."""

    index: int
    b_t: Tensor
    """`[out, rank]`: its B."""
    h: Tensor
    """`[rank]`: its part of `_Matrices.h`."""


@dataclass(frozen=True, slots=True)
class _Matrices:
    """Views of one adapter's matrices for the projection, in the arena."""

    row_table: Sequence[Sequence[int]]
    """The table row when the views were made. A later adapter of the row has another one."""
    a: Tensor
    """`[sum of ranks, in]`: of all touched slices."""
    h: Tensor
    """`[sum of ranks]`: where a lone row's product with A is put."""
    ranks: tuple[int, ...]
    """The ranks of the changed slices."""
    slices: tuple[_SliceMatrices, ...]


class LoraSegments:
    """Adds the deltas of one projection to segments of adjacent tokens."""

    def __init__(self, first_slice: int, in_features: int, slice_outs: tuple[int, ...]) -> None:
        """As in `LoraProjection`."""
        self._first_slice = first_slice
        self._in_features = in_features
        self._slice_outs = slice_outs
        self._matrices: dict[int, _Matrices] = {}  # by row, the oldest first

    def add(
        self, x: Tensor, y: Tensor, weights: AdapterWeights, segments: Sequence[Segment]
    ) -> None:
        """Add the delta to y's rows in these segments.

        x `[num_tokens, in_features]`, y `[num_tokens, sum(slice_outs)]`.
        """
        max_kept = max(MIN_KEPT_ADAPTERS, len(segments))
        columns = y.split_with_sizes(self._slice_outs, dim=1)
        # In half types vectors are no faster, and fp16 would round a little more.
        max_alone = MAX_ROWS_ALONE if x.dtype == torch.float32 else 0
        for segment in segments:
            matrices = self._of_row(segment.row, weights, max_kept)
            if not matrices.slices:
                continue
            if segment.end - segment.start > max_alone:
                _add_together(x, columns, segment, matrices)
                continue
            for token in range(segment.start, segment.end):
                _add_alone(x[token], columns, token, matrices)

    def forget(self, row: int) -> None:
        """Drop the views of a table row's adapter, which is about to leave."""
        self._matrices.pop(row, None)

    def _of_row(self, row: int, weights: AdapterWeights, max_kept: int) -> _Matrices:
        row_table = weights.row_tables[row]
        matrices = self._matrices.get(row)
        if matrices is None or matrices.row_table is not row_table:
            self._matrices.pop(row, None)
            while len(self._matrices) >= max_kept:
                del self._matrices[next(iter(self._matrices))]
            matrices = self._matrices[row] = self._view(row, weights)
        return matrices

    def _view(self, row: int, weights: AdapterWeights) -> _Matrices:
        flat = weights.flat
        entries = entries_of(weights, row, self._first_slice, len(self._slice_outs))
        touched = [index for index, entry in enumerate(entries) if entry[2]]
        ranks = tuple(entries[index][2] for index in touched)
        a = stacked_a(flat, entries, self._in_features)
        # A tensor born in inference mode could not be written outside of it.
        with torch.inference_mode(mode=False):
            h = torch.empty(sum(ranks), dtype=flat.dtype, device=flat.device)
        slices = []
        for index, own in zip(touched, h.split(ranks), strict=True):
            b = slice_b(flat, entries[index], self._slice_outs[index])
            slices.append(_SliceMatrices(index, b.T, own))
        return _Matrices(weights.row_tables[row], a, h, ranks, tuple(slices))


def _add_alone(x: Tensor, columns: Sequence[Tensor], token: int, matrices: _Matrices) -> None:
    """Add one row's delta; x `[in]`."""
    torch.mv(matrices.a, x, out=matrices.h)
    for part in matrices.slices:
        columns[part.index][token].addmv_(part.b_t, part.h)


def _add_together(
    x: Tensor, columns: Sequence[Tensor], segment: Segment, matrices: _Matrices
) -> None:
    """Add a segment's delta."""
    rows = slice(segment.start, segment.end)
    own = x[rows]
    # A single row is summed in another order than several. Duplicating it makes a token's rounding
    # depend less on the other rows of its step.
    num_rows = own.shape[0]
    h = (own if num_rows > 1 else own.expand(2, -1)) @ matrices.a.T
    parts = h[:num_rows].split_with_sizes(matrices.ranks, dim=1)
    for part, own_h in zip(matrices.slices, parts, strict=True):
        columns[part.index][rows].addmm_(own_h, part.b_t.T)
