"""The LoRA op of one projection, with the implementation that fits the device and the step.

On the CPU, a segment is multiplied by its adapter's A, and for each slice by its B, which are read
from the arena. With few rows per segment, as in decoding, the number of calls determines the cost
beyond reading the matrices. Therefore the views of an adapter's matrices are cached. In fp32, one
or two rows are multiplied as separate vectors, because MKL distributes even the smallest matrix
product over its threads. For 16 tokens of 12 rank-8 adapters, one layer of a Llama of 1.1 B, one
thread on an AMD EPYC, this took 1.3 ms, compared with 1.85 ms for new views and matrix products;
reading the bytes takes 0.5 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .lora_batch import LoraBatch, Segment
from .lora_matrices import entries_of, slice_b, stacked_a
from .lora_weights import AdapterWeights
from .lora_window import LoraWindow

MAX_ROWS_ALONE = 2
"""Segments of up to this many rows are multiplied row by row. From three rows on, matrix products
are not slower."""
MIN_KEPT_ADAPTERS = 64
"""The number of adapters whose views are cached, or a step's number if that is larger. The views
take about 3.5 kB per adapter and projection, which would be too much for all adapters of a large
arena."""


class LoraProjection:
    """Adds the adapters' deltas to one projection's base result.

    On the CPU it owns the window that keeps the decoding adapters' matrices together.
    """

    def __init__(self, first_slice: int, in_features: int, slice_outs: tuple[int, ...]) -> None:
        """first_slice: the index of the projection's first slice in the base's layout.

        slice_outs: out_features of each of its slices, in order: column ranges of y.
        """
        self._first_slice = first_slice
        self._in_features = in_features
        self._slice_outs = slice_outs
        self._segments = LoraSegments(first_slice, in_features, slice_outs)
        self._window: LoraWindow | None = None

    def begin(self, x: Tensor, weights: AdapterWeights, batch: LoraBatch) -> Tensor:
        """Start the part that does not need the base's result, on the batch's side stream.

        Returns the argument for `add`.
        """
        from .lora_triton import shrink_tiles  # Triton is not installed everywhere

        assert batch.tiles is not None
        assert batch.side_stream is not None
        batch.side_stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(batch.side_stream):
            return shrink_tiles(
                x,
                weights,
                batch.token_rows,
                batch.tiles,
                first_slice=self._first_slice,
                num_slices=len(self._slice_outs),
            )

    def add(
        self,
        x: Tensor,
        y: Tensor,
        weights: AdapterWeights,
        batch: LoraBatch,
        lora_hidden: Tensor | None = None,
    ) -> None:
        """Add each token's delta to y, in place; see `lora_reference` for the arithmetic.

        x `[num_tokens, in_features]` is the projection's input, y `[num_tokens, sum(slice_outs)]`
        the base's result; both in the dtype of `weights.flat`, rows dense. lora_hidden: what
        `begin` gave, if it was called.
        Raises ValueError if shapes, dtypes or devices do not fit.
        """
        self._check(x, y, weights, batch)
        if lora_hidden is not None:
            self._finish(y, lora_hidden, weights, batch)
        elif batch.tiles is not None:
            self._add_on_gpu(x, y, weights, batch)
        else:
            if batch.decode_adapters:
                self._add_in_window(x, y, weights, batch)
            if batch.segments:
                self._segments.add(x, y, weights, batch.segments)

    def forget(self, row: int) -> None:
        """Zero every copy of the weights of this table row's adapter, and drop references to
        them."""
        self._segments.forget(row)
        if self._window is not None:
            self._window.forget(row)

    def _add_in_window(
        self, x: Tensor, y: Tensor, weights: AdapterWeights, batch: LoraBatch
    ) -> None:
        if self._window is None:
            self._window = LoraWindow(
                self._first_slice,
                self._in_features,
                self._slice_outs,
                dtype=weights.flat.dtype,
                budget=weights.copy_budget,
            )
        decodes = slice(batch.num_decodes)
        self._window.add(
            x[decodes], y[decodes], weights, batch.token_rows[decodes], batch.decode_adapters
        )

    def _add_on_gpu(self, x: Tensor, y: Tensor, weights: AdapterWeights, batch: LoraBatch) -> None:
        from .lora_triton import add_tiles

        assert batch.tiles is not None
        add_tiles(
            x,
            y,
            weights,
            batch.token_rows,
            batch.tiles,
            first_slice=self._first_slice,
            slice_outs=self._slice_outs,
        )

    def _finish(self, y: Tensor, h: Tensor, weights: AdapterWeights, batch: LoraBatch) -> None:
        from .lora_triton import expand_tiles

        assert batch.tiles is not None
        assert batch.side_stream is not None
        torch.cuda.current_stream(y.device).wait_stream(batch.side_stream)
        expand_tiles(
            y,
            h,
            weights,
            batch.token_rows,
            batch.tiles,
            first_slice=self._first_slice,
            slice_outs=self._slice_outs,
        )

    def _check(self, x: Tensor, y: Tensor, weights: AdapterWeights, batch: LoraBatch) -> None:
        num_tokens = batch.token_rows.shape[0]
        if x.shape != (num_tokens, self._in_features):
            raise ValueError(f"x is {list(x.shape)}, not {[num_tokens, self._in_features]}")
        if y.shape != (num_tokens, sum(self._slice_outs)):
            raise ValueError(f"y is {list(y.shape)}, not {[num_tokens, sum(self._slice_outs)]}")
        if not x.dtype == y.dtype == weights.flat.dtype:
            raise ValueError(f"x is {x.dtype}, y {y.dtype}, the arena {weights.flat.dtype}")
        if not x.device == y.device == weights.flat.device:
            raise ValueError(f"x is on {x.device}, y on {y.device}, not on the arena's device")
        if x.stride(1) != 1 or y.stride(1) != 1:
            raise ValueError("the rows of x and y must be dense")


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
            matrices = self._matrices.get(segment.row)
            if matrices is None or matrices.row_table is not weights.row_tables[segment.row]:
                matrices = self._keep(segment.row, weights, max_kept)
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

    def _keep(self, row: int, weights: AdapterWeights, max_kept: int) -> _Matrices:
        """The matrices of the adapter that the row belongs to now, which are cached."""
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
