"""Torch views of one adapter's matrices for one projection in the arena."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .lora_weights import AdapterWeights

Entries = Sequence[Sequence[int]]
"""(a_offset, b_offset, rank) of each slice of a projection."""


def entries_of(weights: AdapterWeights, row: int, first_slice: int, num_slices: int) -> Entries:
    """The table entries of a row's adapter."""
    return weights.row_tables[row][first_slice : first_slice + num_slices]


def stacked_a(flat: Tensor, entries: Entries, in_features: int) -> Tensor:
    """The A matrices of the touched slices, one under another: `[sum of ranks, in_features]`."""
    num_rows = sum([entry[2] for entry in entries])
    start = next((entry[0] for entry in entries if entry[2]), 0)
    return flat.as_strided((num_rows, in_features), (in_features, 1), start)


def slice_b(flat: Tensor, entry: Sequence[int], out_features: int) -> Tensor:
    """One slice's B, `[rank, out_features]`."""
    _, start, rank = entry
    return flat.as_strided((rank, out_features), (out_features, 1), start)
