"""The model's linear layers, fused and with LoRA.

Siblings that read the same input (q, k, v; gate, up) are one projection: one matmul, one shrink.
transformers calls the siblings one after another. The first call computes the projection, and the
others return their slice after checking that their input is the same tensor object.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...adapters.arena import Arena
from ...adapters.block import VECTOR_KINDS, ExtraKind
from ...adapters.layout import Projection
from ...kernels.int8_linear import Int8Linear
from ...kernels.linear import Linear
from ...kernels.lora import LoraProjection
from ...kernels.lora_batch import LoraBatch, Segment
from ...kernels.lora_vectors import apply_vectors
from ...kernels.lora_weights import slice_matrices
from .adapted_module import BaseWeights
from .forward import current_forward
from .linear_shards import RankExchange
from .slice_auxiliary import HeldAuxiliary, added_logits, change_linear


class LinearChange(NamedTuple):
    """How an adapter changes a linear slice: `y × (1 + magnitude) + bias + x Aᵀ B`, for the base's
    result y without its bias. None: that part is left out."""

    a: Tensor | None
    """`[rank, in]`"""
    b: Tensor | None
    """`[rank, out]`"""
    magnitude: Tensor | None
    """`[out]`"""
    bias: Tensor | None
    """`[out]`"""


class LinearAdapters:
    """Changes the base's result of one linear projection in the rows of the step's adapters."""

    def __init__(
        self, projection: Projection, weights: BaseWeights, arena: Arena, slice_range: range
    ) -> None:
        outs = tuple(part.out_features for part in projection.slices)
        self._first_slice = slice_range.start
        self._in_features = projection.in_features
        self._slice_outs = outs
        self._weights = weights
        self.arena = arena
        self._columns = [slice(*ends) for ends in pairwise(accumulate(outs, initial=0))]
        self.lora = LoraProjection(slice_range.start, projection.in_features, outs)
        self._auxiliary = HeldAuxiliary(arena, slice_range)

    def begin(self, x: Tensor, batch: LoraBatch) -> Tensor:
        """Start, on the batch's side stream, the part that does not need the base's result; returns
        the argument for `add`."""
        return self.lora.begin(x, self.arena, batch)

    def add(
        self, x: Tensor, y: Tensor, batch: LoraBatch, lora_hidden: Tensor | None = None
    ) -> None:
        """Change y `[n, out]`, the base's result for x `[n, in]`, in place."""
        for segment in batch.auxiliary:
            self._change(x, y, segment, with_vectors=not batch.launches_vectors)
        if batch.launches_vectors:
            self._apply_vectors(y, batch)
        self.lora.add(x, y, self.arena, batch, lora_hidden)

    def added_logits(self, x: Tensor, vocab_size: int, batch: LoraBatch, num_added: int) -> Tensor:
        """Of an output head: the logits `[n, num_added]` of the tokens that adapters add to the
        base's `vocab_size`, for x `[n, in]`; zero where a row's adapter adds fewer."""
        logits = x.new_zeros(x.shape[0], num_added)
        for segment in batch.auxiliary:
            rows = slice(segment.start, segment.end)
            for _, auxiliary in self._auxiliary.of_row(segment.row):
                own = added_logits(x[rows], vocab_size, auxiliary)
                if own is not None:
                    logits[rows, : own.shape[1]] = own
        return logits

    def change_of(self, row: int) -> LinearChange | None:
        """How a row's adapter changes the projection's only slice, if it does."""
        (out_features,) = self._slice_outs
        matrices = slice_matrices(
            self.arena,
            row,
            self._first_slice,
            in_features=self._in_features,
            out_features=out_features,
        )
        held = self._auxiliary.of_row(row)
        if matrices is None and not held:
            return None
        a, b = matrices or (None, None)
        values = held[0][1].values if held else {}
        assert set(values) <= set(VECTOR_KINDS), "only the model's ends have whole matrices"
        biases = [values[kind] for kind in (ExtraKind.BIAS, ExtraKind.LORA_BIAS) if kind in values]
        bias = torch.stack(biases).sum(dim=0) if biases else None
        return LinearChange(a, b, values.get(ExtraKind.MAGNITUDE), bias)

    def forget(self, row: int) -> None:
        """Zero and drop cached data of a table row's adapter."""
        self._auxiliary.forget(row)

    def _apply_vectors(self, y: Tensor, batch: LoraBatch) -> None:
        apply_vectors(
            y,
            self.arena,
            batch.token_rows,
            self._weights.bias,
            first_slice=self._first_slice,
            slice_outs=self._slice_outs,
        )

    def _change(self, x: Tensor, y: Tensor, segment: Segment, *, with_vectors: bool) -> None:
        rows, bias = slice(segment.start, segment.end), self._weights.bias
        for index, auxiliary in self._auxiliary.of_row(segment.row):
            columns = self._columns[index]
            own_bias = None if bias is None else bias[columns]
            change_linear(x[rows], y[rows, columns], own_bias, auxiliary, with_vectors=with_vectors)


class FusedProjection:
    """One projection: its packed base weights and its position in the adapters' tables."""

    def __init__(
        self, projection: Projection, linear: Linear, exchange: RankExchange | None = None
    ) -> None:
        """`exchange`: how the ranks' results become whole; None: this one's is."""
        self.projection = projection
        self.linear = linear
        self.rounded: Linear | None = None
        """The same layers in fewer bits, for the base's own drafts; None without them."""
        self._exchange = exchange
        outs = [part.out_features for part in projection.slices]
        self._splits = outs if exchange is None else exchange.slice_outs
        self._adapters: LinearAdapters | None = None
        self._input: Tensor | None = None
        self._slices: list[Tensor | None] = []

    @property
    def base_weights(self) -> Linear:
        return self.linear

    @property
    def is_partial(self) -> bool:
        """Whether this rank has a part of the inputs: an output is the sum of all ranks'."""
        return self._exchange is not None and self._exchange.sums

    @property
    def adapters(self) -> LinearAdapters | None:
        """None before an arena is attached."""
        return self._adapters

    def attach(self, arena: Arena, slice_range: range) -> None:
        """From now on, change the rows of the step's adapters with this arena's values."""
        self._adapters = LinearAdapters(self.projection, self.linear, arena, slice_range)

    def slice(self, index: int, x: Tensor) -> Tensor:
        """The output of one slice for `x [..., in_features]`."""
        if len(self._splits) == 1:
            return self._compute(x)
        if self._input is not x or self._slices[index] is None:
            self._slices = list(self._compute(x).split_with_sizes(self._splits, dim=-1))
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
        if rows.stride(-1) != 1:  # as after a convolution, along whose rows tokens are adjacent
            rows = rows.contiguous()
        largest: tuple[Tensor, ...] = ()
        if self._exchange:
            if self.is_partial and isinstance(self.linear, Int8Linear):
                largest = (self._exchange.largest_inputs(rows),)
            rows = self._exchange.inputs(rows)
        step = current_forward.get()
        lora = step.lora if step else None
        if lora is None or self._adapters is None:
            y: Tensor = self.linear(rows, *largest)
        else:
            lora_hidden = self._adapters.begin(rows, lora) if lora.side_stream else None
            y = self.linear(rows, *largest)
            self._adapters.add(rows, y, lora, lora_hidden)
        if self._exchange:
            y = self._exchange.whole(y)
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
