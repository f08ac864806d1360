"""The arena as the LoRA kernels see it: one flat tensor, and a table of matrix offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor


class CopyBudget(Protocol):
    """Bytes for copies of the adapters' matrices, of all projections together."""

    def take(self, num_bytes: int) -> bool:
        """Take this many bytes; False, without effect, if fewer are left."""

    def give_back(self, num_bytes: int) -> None: ...

    def discard(self, values: Tensor) -> None:
        """Register a copy of a removed adapter's matrices, which is zeroed soon."""


class DeviceWeights(Protocol):
    """The weights as kernels on a device read them: see AdapterWeights."""

    flat: Tensor
    table: Tensor


class AdapterWeights(DeviceWeights, Protocol):
    """Every resident adapter's matrices. A table row is one adapter.

    For each slice of the base the table holds (a_offset, b_offset, rank): absolute element offsets
    into `flat`; rank 0 means "not changed". A is `[rank, in]`, B is stored transposed, `[rank,
    out]`, with the scale folded in; both are finite. Within one projection, the A matrices of the
    changed slices are contiguous, in slice order. The `a_offset` of the first of them and every
    `b_offset` are multiples of 16.
    """

    flat: Tensor
    """`[capacity]` in the serving dtype."""
    table: Tensor
    """int64 `[num_rows, num_slices, 3]` on the device."""

    @property
    def row_tables(self) -> Sequence[Sequence[Sequence[int]]]:
        """The same in host memory, for the paths that find matrices in Python."""

    @property
    def row_auxiliary(self) -> Sequence[Mapping[int, object]]:
        """For each row, the adapter's auxiliary tensors by slice index; mostly empty."""

    @property
    def copy_budget(self) -> CopyBudget:
        """The budget for the kernels' copies of the weights."""
