"""A step's sequences, as kernels see them that go on from states."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StateRows(NamedTuple):
    """The rows of all sequences are adjacent and in the order of the sequences."""

    bounds: Tensor
    """int64 `[num_sequences + 1]`: the first row of each, and the number of all rows."""
    sources: Tensor
    """int64 `[num_sequences]`: the state that each goes on from."""


def row_stride(x: Tensor) -> int:
    """From a row to the next. Of a single row it is that of dense rows: the strides of axes of size
    1 are arbitrary, and a Triton kernel is compiled again for other divisors."""
    return x.stride(0) if len(x) > 1 else x[0].numel()
