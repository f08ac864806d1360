"""The adapters of one linear projection: what fused layers and the output head share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

from torch import Tensor

from ..adapters.arena import Arena, RowExtras
from ..adapters.block import ExtraKind, PlacedExtra
from ..adapters.layout import Projection
from ..kernels.lora import LoraProjection
from ..kernels.lora_batch import LoraBatch, Segment
from .adapted_module import BaseWeights
from .slice_extras import TokenRows, by_kind, change_linear, values


class LinearAdapters:
    """Changes the base's result in the rows of the step's adapters."""

    def __init__(
        self, projection: Projection, weights: BaseWeights, arena: Arena, slice_range: range
    ) -> None:
        outs = [part.out_features for part in projection.slices]
        self._weights = weights
        self._arena = arena
        self._slices = slice_range
        self._columns = [slice(*ends) for ends in pairwise(accumulate(outs, initial=0))]
        self._lora = LoraProjection(slice_range.start, projection.in_features, tuple(outs))
        self._token_rows = [TokenRows() for _ in outs]

    def add(self, x: Tensor, y: Tensor, batch: LoraBatch) -> None:
        """Change y `[n, out]`, the base's result for x `[n, in]`, in place."""
        for segment in batch.extras:
            self._change(x, y, segment)
        self._lora.add(x, y, self._arena, batch)

    def forget(self, row: int) -> None:
        """Zero and drop what was kept of a table row's adapter."""
        self._lora.forget(row)
        for token_rows in self._token_rows:
            token_rows.forget(row)

    def _change(self, x: Tensor, y: Tensor, segment: Segment) -> None:
        rows = slice(segment.start, segment.end)
        bias, flat = self._weights.bias, self._arena.flat
        for index, extras in self._held(self._arena.row_extras[segment.row]):
            columns, held = self._columns[index], by_kind(extras)
            token_ids = None
            if placed := held.get(ExtraKind.TOKEN_ROWS):
                token_ids = self._token_rows[index].token_ids(segment.row, placed, y.device)
            change_linear(
                x[rows],
                y[rows, columns],
                None if bias is None else bias[columns],
                {kind: values(flat, placed) for kind, placed in held.items()},
                token_ids,
            )

    def _held(self, extras: RowExtras) -> Iterator[tuple[int, tuple[PlacedExtra, ...]]]:
        for index, slice_index in enumerate(self._slices):
            if slice_index in extras:
                yield index, extras[slice_index]
