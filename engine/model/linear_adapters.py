"""The adapters of one linear projection, shared by fused layers and the output head."""

from __future__ import annotations

from itertools import accumulate, pairwise

from torch import Tensor

from ...adapters.arena import Arena
from ...adapters.layout import Projection
from ...kernels.lora import LoraProjection
from ...kernels.lora_batch import LoraBatch, Segment
from .adapted_module import BaseWeights
from .slice_auxiliary import HeldAuxiliary, change_linear


class LinearAdapters:
    """Changes the base's result in the rows of the step's adapters."""

    def __init__(
        self, projection: Projection, weights: BaseWeights, arena: Arena, slice_range: range
    ) -> None:
        outs = [part.out_features for part in projection.slices]
        self._weights = weights
        self._arena = arena
        self._columns = [slice(*ends) for ends in pairwise(accumulate(outs, initial=0))]
        self._lora = LoraProjection(slice_range.start, projection.in_features, tuple(outs))
        self._auxiliary = HeldAuxiliary(arena, slice_range)

    def begin(self, x: Tensor, batch: LoraBatch) -> Tensor | None:
        """Start the part that does not need the base's result; returns the argument for `add`."""
        return self._lora.begin(x, self._arena, batch)

    def add(
        self, x: Tensor, y: Tensor, batch: LoraBatch, lora_hidden: Tensor | None = None
    ) -> None:
        """Change y `[n, out]`, the base's result for x `[n, in]`, in place."""
        for segment in batch.auxiliary:
            self._change(x, y, segment)
        self._lora.add(x, y, self._arena, batch, lora_hidden)

    def forget(self, row: int) -> None:
        """Zero and drop cached data of a table row's adapter."""
        self._lora.forget(row)
        self._auxiliary.forget(row)

    def _change(self, x: Tensor, y: Tensor, segment: Segment) -> None:
        rows, bias = slice(segment.start, segment.end), self._weights.bias
        for index, auxiliary in self._auxiliary.of_row(segment.row):
            columns = self._columns[index]
            own_bias = None if bias is None else bias[columns]
            change_linear(x[rows], y[rows, columns], own_bias, auxiliary)
