"""The model's linear layers, fused and with LoRA.

Siblings that read the same input (q, k, v; gate, up) are one projection: one matmul, one shrink.
transformers calls the siblings one after another. The first call computes the projection, and the
others return their slice after checking that their input is the same tensor object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from ...adapters.layout import Projection
from ...kernels.linear import Linear
from .forward import current_forward
from .linear_adapters import LinearAdapters

if TYPE_CHECKING:
    from ...adapters.arena import Arena


class FusedProjection:
    """One projection: its packed base weights and its position in the adapters' tables."""

    def __init__(self, projection: Projection, linear: Linear) -> None:
        self.projection = projection
        self.linear = linear
        self._splits = [part.out_features for part in projection.slices]
        self._adapters: LinearAdapters | None = None
        self._input: Tensor | None = None
        self._slices: list[Tensor | None] = []

    @property
    def base_weights(self) -> Linear:
        return self.linear

    def attach(self, arena: Arena, slice_range: range) -> None:
        """From now on, change the rows of the step's adapters with this arena's values."""
        self._adapters = LinearAdapters(self.projection, self.linear, arena, slice_range)

    def slice(self, index: int, x: Tensor) -> Tensor:
        """The output of one slice for `x [..., in_features]`."""
        if self._input is not x or self._slices[index] is None:
            self._slices = list(self._compute(x).split(self._splits, dim=-1))
            self._input = x
        out = self._slices[index]
        assert out is not None
        self._slices[index] = None
        if all(part is None for part in self._slices):
            self._input = None
        return out

    def forget_adapter(self, row: int) -> None:
        """Zero this projection's copies of a row's weights outside of the arena."""
        if self._adapters:
            self._adapters.forget(row)

    def forget_step(self) -> None:
        """Drop the leftovers of a step that failed midway."""
        self._input, self._slices = None, []

    def _compute(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        step = current_forward()
        if not (step and step.lora and self._adapters):
            y: Tensor = self.linear(rows)
        else:
            lora_hidden = self._adapters.begin(rows, step.lora)
            y = self.linear(rows)
            self._adapters.add(rows, y, step.lora, lora_hidden)
        return y.view(*x.shape[:-1], y.shape[-1])


class ProjectionSlice(nn.Module):
    """Replaces the original linear layer in the model."""

    def __init__(self, fused: FusedProjection, index: int) -> None:
        super().__init__()
        self.fused = fused
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., in_features]` to `[..., out_features]`."""
        return self.fused.slice(self.index, x)

    def extra_repr(self) -> str:
        part = self.fused.projection.slices[self.index]
        return f"{part.name}, in={part.in_features}, out={part.out_features}"
