"""The weight of a linear layer, of which rows are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ...kernels.quantized_weight import QuantizedWeight, empty_rows
from ..checkpoint.stored_weights import RowReader, Values, row_reader, weight_values
from ..errors import QuantizedBase

_PIECE_NUMBERS = 1 << 17
"""Of rows that are read at a time: unpacking or quantizing takes up to 30 bytes for each."""
_LEAST_ROWS = 8
"""AWQ has the codes of so many outputs in a word."""


class WeightRows(NamedTuple):
    """A weight `[out, in]`."""

    num_rows: int
    in_features: int
    read: RowReader


def rows_of(module: nn.Module) -> WeightRows:
    """The weight of a linear layer; nothing is read yet. Raises QuantizedBase."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    if not isinstance(module, Conv1D):
        return WeightRows(weight.shape[0], weight.shape[1], row_reader(module))
    whole = whole_rows(module)
    assert isinstance(whole, Tensor)
    num_rows, in_features = whole.shape
    return WeightRows(num_rows, in_features, lambda rows: whole[rows.start : rows.stop])


def whole_rows(module: nn.Module) -> Values:
    """All rows of a linear layer's weight, `[out, in]`. Raises QuantizedBase."""
    values = weight_values(module)
    if not isinstance(module, Conv1D):
        return values
    if isinstance(values, Tensor):
        return values.T
    raise QuantizedBase("quantized weights of Conv1D layers (GPT-2) are not served")


def in_pieces(rows: range, in_features: int) -> Iterator[range]:
    """Adjacent rows of so many inputs, in pieces that are small however wide the rows are."""
    size = max(_PIECE_NUMBERS // in_features // _LEAST_ROWS, 1) * _LEAST_ROWS
    return (range(start, min(start + size, rows.stop)) for start in rows[::size])


def join_pieces(form: Values, num_rows: int, pieces: Iterable[Values]) -> Values:
    """The pieces below one another, in memory of their own. `form`: one row, of the form of all."""
    if isinstance(form, QuantizedWeight):
        whole: Values = empty_rows(form, num_rows)
    else:
        whole = form.new_empty(num_rows, *form.shape[1:])
    start = 0
    for piece in pieces:
        start += _put(whole, start, piece)
    return whole


def _put(whole: Values, start: int, piece: Values) -> int:
    """Write the rows of the piece from `start`. Returns how many they are."""
    end = start + piece.shape[0]
    if isinstance(piece, Tensor):
        assert isinstance(whole, Tensor)
        whole[start:end] = piece
    else:
        assert isinstance(whole, QuantizedWeight)
        whole.rows(start, end).fill(piece)
    return end - start
