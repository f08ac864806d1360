"""A rank's part of the weights of linear layers, read a few rows at a time.

Only one piece is in another form than the part: as it is in the file, in fp32 or as whole rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from ..checkpoint.stored_weights import Values, stack_values
from .linear_shards import LinearShards
from .load_quantization import LoadQuantization
from .weight_rows import in_pieces, join_pieces, rows_of


class _Part(NamedTuple):
    """This rank's part of one layer."""

    outputs: range
    in_features: int
    """Of the whole layer."""
    read: Callable[[range], Values]
    """The rank's inputs of some of its outputs."""

    @property
    def form(self) -> Values:
        """One row: all are of its form."""
        return self.read(range(self.outputs.start, self.outputs.start + 1))

    def pieces(self) -> Iterator[Values]:
        return map(self.read, in_pieces(self.outputs, self.in_features))


def part_weights(
    group: Sequence[tuple[str, nn.Module]], quantization: LoadQuantization, shards: LinearShards
) -> list[Values]:
    """This rank's part of linear layers that read the same input, given by their paths: one weight,
    `[out, in]` below one another; one for each if they are not of one form.

    Raises QuantizedBase, and UnsupportedModel if a weight cannot be divided.
    """
    parts = [_part(path, module, quantization, shards) for path, module in group]
    forms = [part.form for part in parts]
    if stack_values(forms) is None:
        return [_joined(form, [part]) for form, part in zip(forms, parts, strict=True)]
    return [_joined(forms[0], parts)]


def _part(
    path: str, module: nn.Module, quantization: LoadQuantization, shards: LinearShards
) -> _Part:
    rows = rows_of(module)

    def read(outputs: range) -> Values:
        # Scales may belong to all inputs of a row: whole rows are quantized, then cut.
        return shards.inputs(path, quantization.apply(path, rows.read(outputs)))

    return _Part(shards.outputs(path, rows.num_rows), rows.in_features, read)


def _joined(form: Values, parts: Sequence[_Part]) -> Values:
    """The parts below one another."""
    num_rows = sum(len(part.outputs) for part in parts)
    return join_pieces(form, num_rows, (piece for part in parts for piece in part.pieces()))
