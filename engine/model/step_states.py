"""The states of a step: each sequence's before it, and what it makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ...kernels.causal_conv import causal_conv
from ...kernels.kv_pages import GatherBuffer
from ..kv.groups import StateShape
from .recurrences import StateChange
from .state_batch import StateBatch


class StepStates(Protocol):
    """Computes the parts of layers that depend on the tokens before."""

    def enter(self, layer_index: int, module: nn.Module) -> None:
        """The module of this layer computes next."""
        ...

    def convolve(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        """transformers' causal convolution of `hidden_states [1, channels, num_tokens]`, `weight
        [channels, width]`."""
        ...

    def recur(self, change: StateChange) -> Tensor:
        """The outputs of all rows of the step."""
        ...

    def commit(self) -> None:
        """Replace the states before the step by those after it: all layers have computed."""
        ...


class ProbedStates:
    """Each call begins with zeros; its shape is noted."""

    def __init__(self) -> None:
        self.shapes: dict[int, list[StateShape]] = {}
        """By layer, in the order of the calls."""
        self._layer: int | None = None

    def enter(self, layer_index: int, module: nn.Module) -> None:
        """See `StepStates.enter`."""
        self._layer = layer_index
        module.__dict__[FIRST_STATE] = len(self.shapes.get(layer_index, ()))

    def convolve(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        """See `StepStates.convolve`."""
        channels, width = weight.shape
        self._note(StateShape((channels, width - 1), hidden_states.dtype))
        out = F.conv1d(
            hidden_states.to(weight.dtype),
            weight[:, None],
            bias,
            padding=width - 1,
            groups=channels,
        )
        return _activate(out[..., : hidden_states.shape[2]], activation, hidden_states.dtype)

    def recur(self, change: StateChange) -> Tensor:
        """See `StepStates.recur`."""
        self._note(StateShape(change.state_size, torch.float32))
        return change.new_outputs().zero_()

    def commit(self) -> None:
        """See `StepStates.commit`."""

    def _note(self, shape: StateShape) -> None:
        assert self._layer is not None, "a module with states was entered"
        self.shapes.setdefault(self._layer, []).append(shape)


FIRST_STATE = "first_state"
"""The attribute of a module with the place of its first state among those of its layer."""


class PagedStates:
    """Each sequence goes on from the states in its block, which are replaced when all layers have
    computed: a pass that fails can be repeated."""

    def __init__(
        self,
        states: Mapping[int, list[Tensor]],
        memory: Mapping[tuple[int, int], GatherBuffer],
        batch: StateBatch,
    ) -> None:
        """states: by layer, `[num_blocks, *size]` each; memory: for each of them, by layer and
        index, for the states after a step."""
        self._states = states
        self._memory = memory
        self._batch = batch
        self._layer, self._place = 0, 0
        self._after: list[tuple[Tensor, Tensor]] = []

    def enter(self, layer_index: int, module: nn.Module) -> None:
        """See `StepStates.enter`."""
        self._layer, self._place = layer_index, module.__dict__[FIRST_STATE]

    def convolve(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        """See `StepStates.convolve`."""
        stored = self._next()
        index = self._batch.conv_index(weight.shape[1])
        before = stored.index_select(0, self._batch.rows.sources)
        out, after = causal_conv(hidden_states[0].T, weight, bias, before, index)
        self._after.append((stored, after))
        return _activate(out.T[None], activation, hidden_states.dtype)

    def recur(self, change: StateChange) -> Tensor:
        """See `StepStates.recur`."""
        memory = self._memory[self._layer, self._place]
        stored, rows = self._next(), self._batch.rows
        size = (len(rows.sources), *change.state_size)
        after = memory.take(size, stored.dtype, stored.device)
        out = change.advance(stored, rows, after)
        self._after.append((stored, after))
        return out

    def commit(self) -> None:
        """See `StepStates.commit`."""
        for stored, after in self._after:
            stored.index_copy_(0, self._batch.targets, after)
        self._after.clear()

    def _next(self) -> Tensor:
        stored = self._states[self._layer][self._place]
        self._place += 1
        return stored


def _activate(out: Tensor, activation: str | None, dtype: torch.dtype) -> Tensor:
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(dtype)
