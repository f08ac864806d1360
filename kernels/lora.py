"""The LoRA op of one projection, with the implementation that fits the device and the step.

On the CPU, the library adds the deltas of all tokens in one call. Where there is no library,
PyTorch multiplies each segment: by its adapter's A, and for each slice by its B, which are read
from the arena.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .lora_batch import LoraBatch, Segment
from .lora_cpu import CpuLora
from .lora_weights import AdapterWeights

Entries = Sequence[Sequence[int]]
"""(a_offset, b_offset, rank) of each slice of a projection."""
MAX_ROWS_ALONE = 2
"""In fp32, segments of up to this many rows are multiplied row by row: MKL distributes even the
smallest matrix product over its threads, and adds in another order for one row than for two."""


class LoraProjection:
    """Adds the adapters' deltas to one projection's base result."""

    def __init__(self, first_slice: int, in_features: int, slice_outs: tuple[int, ...]) -> None:
        """first_slice: the index of the projection's first slice in the base's layout.

        slice_outs: out_features of each of its slices, in order: column ranges of y.
        """
        self._first_slice = first_slice
        self._in_features = in_features
        self._slice_outs = slice_outs
        self._cpu = CpuLora(first_slice, in_features, slice_outs)

    def described(self, weights: AdapterWeights) -> int:
        """The projection as the CPU's library takes it: an address."""
        return self._cpu.described(weights)

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
            self._add_on_cpu(x, y, weights, batch)

    def _add_on_cpu(self, x: Tensor, y: Tensor, weights: AdapterWeights, batch: LoraBatch) -> None:
        if not batch.segments:
            self._cpu.add(x, y, weights, batch.token_rows, batch.max_rank)
            return
        add_segments(
            x,
            y,
            weights,
            batch.segments,
            first_slice=self._first_slice,
            slice_outs=self._slice_outs,
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


def add_segments(
    x: Tensor,
    y: Tensor,
    weights: AdapterWeights,
    segments: Sequence[Segment],
    *,
    first_slice: int,
    slice_outs: tuple[int, ...],
) -> None:
    """Add the delta of one projection to y's rows in these segments, with PyTorch.

    x `[num_tokens, in_features]`, y `[num_tokens, sum(slice_outs)]`.
    """
    # In half types vectors are no faster, and fp16 would round a little more.
    max_alone = MAX_ROWS_ALONE if x.dtype == torch.float32 else 0
    for segment in segments:
        entries = weights.row_tables[segment.row][first_slice : first_slice + len(slice_outs)]
        if any(entry[2] for entry in entries):
            rows = slice(segment.start, segment.end)
            add = _add_alone if segment.end - segment.start <= max_alone else _add_together
            add(x[rows], y[rows].split_with_sizes(slice_outs, dim=1), weights.flat, entries)


def _add_alone(x: Tensor, columns: Sequence[Tensor], flat: Tensor, entries: Entries) -> None:
    """Add the delta of each row by itself."""
    a = _stacked_a(flat, entries, x.shape[1])
    for token, row in enumerate(x):
        parts = torch.mv(a, row).split_with_sizes([entry[2] for entry in entries])
        for column, entry, h in zip(columns, entries, parts, strict=True):
            if entry[2]:
                column[token].addmv_(_slice_b(flat, entry, column.shape[1]).T, h)


def _add_together(x: Tensor, columns: Sequence[Tensor], flat: Tensor, entries: Entries) -> None:
    """Add the delta of all rows."""
    num_rows = x.shape[0]
    # A single row is summed in another order than several. Duplicating it makes a token's rounding
    # depend less on the other rows of its step.
    h = (x if num_rows > 1 else x.expand(2, -1)) @ _stacked_a(flat, entries, x.shape[1]).T
    parts = h[:num_rows].split_with_sizes([entry[2] for entry in entries], dim=1)
    for column, entry, own in zip(columns, entries, parts, strict=True):
        if entry[2]:
            column.addmm_(own, _slice_b(flat, entry, column.shape[1]))


def _stacked_a(flat: Tensor, entries: Entries, in_features: int) -> Tensor:
    """The A matrices of the touched slices, one under another: `[sum of ranks, in_features]`."""
    num_rows = sum([entry[2] for entry in entries])
    start = next((entry[0] for entry in entries if entry[2]), 0)
    # as_strided counts from the beginning of the memory.
    start += int(flat.storage_offset())
    return flat.as_strided((num_rows, in_features), (in_features, 1), start)


def _slice_b(flat: Tensor, entry: Sequence[int], out_features: int) -> Tensor:
    """One slice's B, `[rank, out_features]`."""
    _, start, rank = entry
    start += int(flat.storage_offset())
    return flat.as_strided((rank, out_features), (out_features, 1), start)
