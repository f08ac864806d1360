"""Layout of a PEFT tensor within a block, and its inverse.

PEFT stores tensors as its modules use them. A block stores them so that the kernels read adjacent
values. Every layout is exactly invertible, so an adapter's original files can be restored.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from .safetensors_header import TensorEntry
from .weights import Array


class Order(StrEnum):
    """The order of a tensor's values in a block."""

    AS_STORED = "as_stored"
    TRANSPOSED = "transposed"
    """For B `[out, rank]` and an embedding's A `[rank, vocabulary]`."""
    BY_EXPERT = "by_expert"
    """For PEFT's B of experts, `[out, rank · experts]` rank by rank: `[experts, rank, out]`."""
    ROWS = "rows"
    """Rows in another order."""
    PLANES = "planes"
    """For A of one expert or several, stored `[rank, in]` or `[experts, rank, in]`: part of a
    region."""
    TRANSPOSED_PLANES = "transposed_planes"
    """For B of one expert or several, stored `[out, rank]` or `[experts, out, rank]`: part of a
    region."""


class Region(NamedTuple):
    """The part of a matrix `[experts, rank, width]` that one of several tensors fills.

    What no tensor fills is zero.
    """

    shape: tuple[int, int, int]
    """Of the whole matrix."""
    expert: int | None
    """The expert that the tensor is for; None: each expert has its plane, or all have the same."""
    first_row: int
    first_column: int
    column_step: int

    def view(self, matrix: Array, num_rows: int, num_columns: int) -> Array:
        """The region of these sizes in the whole matrix, which may be flat: `[1 or experts,
        num_rows, num_columns]`."""
        experts = matrix.reshape(self.shape)
        if self.expert is not None:
            experts = experts[self.expert : self.expert + 1]
        last_column = self.first_column + (num_columns - 1) * self.column_step
        return experts[
            :,
            self.first_row : self.first_row + num_rows,
            self.first_column : last_column + 1 : self.column_step,
        ]


class Arrangement(NamedTuple):
    """The layout of one tensor."""

    order: Order
    num_experts: int = 1
    """For BY_EXPERT."""
    rows: tuple[int, ...] = ()
    """For ROWS: the stored row of each row in the block."""
    region: Region | None = None
    """For PLANES and TRANSPOSED_PLANES."""

    def apply(self, stored: Array) -> Array:
        """From PEFT's tensor to the block's; a view where that is possible."""
        match self.order:
            case Order.TRANSPOSED:
                return stored.T
            case Order.BY_EXPERT:
                out_features = stored.shape[0]
                return stored.reshape(out_features, -1, self.num_experts).transpose(2, 1, 0)
            case Order.ROWS:
                rows: Array = stored[np.array(self.rows)]
                return rows
            case Order.PLANES:
                return stored.reshape(-1, *stored.shape[-2:])
            case Order.TRANSPOSED_PLANES:
                return stored.reshape(-1, *stored.shape[-2:]).transpose(0, 2, 1)
            case _:
                return stored

    def undo(self, values: Array, shape: tuple[int, ...]) -> Array:
        """From the block's values, flat, to PEFT's tensor of this shape.

        `values` are those of the tensor, or of the whole matrix if it fills a region of one.
        """
        match self.order:
            case Order.TRANSPOSED:
                return values.reshape(shape[::-1]).T
            case Order.BY_EXPERT:
                arranged = values.reshape(self.num_experts, -1, shape[0])
                return arranged.transpose(2, 1, 0).reshape(shape)
            case Order.ROWS:
                stored = np.empty(shape, values.dtype)
                stored[np.array(self.rows)] = values.reshape(shape)
                return stored
            case Order.PLANES:
                return self._planes(values, shape).reshape(shape)
            case Order.TRANSPOSED_PLANES:
                turned = (*shape[:-2], shape[-1], shape[-2])
                return self._planes(values, turned).transpose(0, 2, 1).reshape(shape)
            case _:
                return values.reshape(shape)

    def _planes(self, matrix: Array, shape: tuple[int, ...]) -> Array:
        """What was placed, `[planes, rank, width]`; of a plane for all experts, the first one's."""
        assert self.region is not None
        num_planes = shape[0] if len(shape) == 3 else 1
        return self.region.view(matrix, *shape[-2:])[:num_planes]


def compose(tensors: Iterable[tuple[Arrangement, Array]]) -> Array:
    """The block's matrix of one tensor, or of all those that fill regions of it."""
    matrix: Array | None = None
    for arrangement, stored in tensors:
        values = arrangement.apply(stored)
        if arrangement.region is None:
            return values
        if matrix is None:
            matrix = np.zeros(arrangement.region.shape, values.dtype)
        arrangement.region.view(matrix, *values.shape[1:])[:] = values
    assert matrix is not None
    return matrix


class PlacedTensor(NamedTuple):
    """A tensor and its position in the block."""

    offset: int
    """In elements, from the block's start; of its matrix, if it fills a region of one."""
    tensor: TensorEntry
    arrangement: Arrangement
    is_copy: bool = False
    """It is also stored at another position, from which it is restored."""
