"""Layout of a PEFT tensor within a block, and its inverse.

PEFT stores tensors as its modules use them. A block stores them so that the kernels read adjacent
values. Every layout is exactly invertible, so an adapter's original files can be restored.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import numpy as np

from .bound import BoundSlice
from .layout import SliceKind
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


class Arrangement(NamedTuple):
    """The layout of one tensor."""

    order: Order
    num_experts: int = 1
    """For BY_EXPERT."""
    rows: tuple[int, ...] = ()
    """For ROWS: the stored row of each row in the block."""

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
            case _:
                return stored

    def undo(self, values: Array, shape: tuple[int, ...]) -> Array:
        """From the block's values, flat, to PEFT's tensor of this shape."""
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
            case _:
                return values.reshape(shape)


class PlacedTensor(NamedTuple):
    """A tensor and its position in the block."""

    offset: int
    """In elements, from the block's start."""
    tensor: TensorEntry
    arrangement: Arrangement
    is_copy: bool = False
    """It is also stored at another position, from which it is restored."""


def arrangement_of_a(part: BoundSlice) -> Arrangement:
    """Of the block's A, the first `in_order`."""
    if part.layer.is_turned:
        return Arrangement(Order.BY_EXPERT, part.layer.num_experts)
    is_embedding = part.layer.kind is SliceKind.EMBEDDING
    return Arrangement(Order.TRANSPOSED if is_embedding else Order.AS_STORED)


def arrangement_of_b(part: BoundSlice) -> Arrangement:
    """Of the block's B, the second."""
    if part.layer.is_turned:
        return Arrangement(Order.AS_STORED)
    if part.layer.kind is SliceKind.EXPERTS:
        return Arrangement(Order.BY_EXPERT, part.layer.num_experts)
    return Arrangement(Order.TRANSPOSED)
