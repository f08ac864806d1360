"""The arena as the LoRA kernels see it: one flat tensor, and tables of offsets into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from torch import Tensor


class AdapterWeights(Protocol):
    """Every resident adapter's matrices. A table row is one adapter.

    For each slice of the base the table holds (a_offset, b_offset, rank): absolute element offsets
    into `flat`; rank 0 means "not changed". A is `[rank, in]`, B is stored transposed, `[rank,
    out]`, with the scale folded in; both are finite. Within one projection, the A matrices of the
    changed slices are contiguous, in slice order. The `a_offset` of the first of them and every
    `b_offset` are multiples of 16.

    An adapter's vectors for a slice, `[out]` each, are its magnitude, its bias and the bias of its
    B: see `lora_vectors`. `vectors` holds their offsets, multiples of 16, or -1 for none.
    """

    flat: Tensor
    """`[capacity]` in the serving dtype."""
    table: Tensor
    """int64 `[num_rows, num_slices, 3]` on the device."""
    vectors: Tensor
    """int64 `[num_rows, num_slices, 3]` on the device."""

    @property
    def row_tables(self) -> Sequence[Sequence[Sequence[int]]]:
        """The same in host memory, for the paths that find matrices in Python."""

    @property
    def row_auxiliary(self) -> Sequence[Mapping[int, object]]:
        """For each row, the adapter's auxiliary tensors by slice index; mostly empty."""

    @property
    def replacing_rows(self) -> Set[int]:
        """The rows whose adapters replace a matrix of the base or rows of it: they hold auxiliary
        tensors that are not `vectors`."""

    @property
    def row_vocabularies(self) -> Mapping[int, int]:
        """The rows whose adapters have another number of tokens than the base, with that number."""


def slice_matrices(
    weights: AdapterWeights, row: int, slice_index: int, *, in_features: int, out_features: int
) -> tuple[Tensor, Tensor] | None:
    """A `[rank, in]` and B `[rank, out]` of a row's adapter for a slice, as views; None: it has
    none."""
    a_start, b_start, rank = weights.row_tables[row][slice_index]
    if not rank:
        return None
    first = weights.flat.storage_offset()  # as_strided counts from the beginning of the memory
    a = weights.flat.as_strided((rank, in_features), (in_features, 1), first + a_start)
    b = weights.flat.as_strided((rank, out_features), (out_features, 1), first + b_start)
    return a, b
