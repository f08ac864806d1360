"""The states of a step: each sequence's before it, and what it makes of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ...kernels.causal_conv import causal_conv
from ..kv.groups import StateShape
from .state_batch import EqualLengths, StateBatch

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A function of transformers that goes through the tokens of a batch of sequences."""

    time_dims: Mapping[str, int]
    """The arguments with a value per token, and the dimension of the tokens. The output has it
    where the first of them has it."""
    initial_state: str
    """The argument for the states `[batch, ...]` to begin with."""
    returns_state: str = ""
    """The argument to also return the states after the last token; empty: they always are."""
    chunk_size: int | None = None
    """The most tokens that it computes at once, if that is an argument; it pads others to it."""
    compute: Callable[..., tuple[Tensor, Tensor]] | None = None
    """Computes the same in its stead, if it cannot go on from a state."""

    def run(
        self, function: Callable[..., Any], arguments: Arguments, states: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The output of `function` and the states after it; None: zeros before it."""
        function = self.compute or function
        known = inspect.signature(function).parameters
        given = {name: value for name, value in arguments.items() if name in known}
        given[self.initial_state] = states
        if self.returns_state:
            given[self.returns_state] = True
        if self.chunk_size is not None:
            largest = given.get("chunk_size", self.chunk_size)
            given["chunk_size"] = min(largest, _power_of_two(self.num_tokens(arguments)))
        out, after = function(**given)
        return out, after

    def num_tokens(self, arguments: Arguments) -> int:
        name, dim = next(iter(self.time_dims.items()))
        length = arguments[name].shape[dim]
        assert isinstance(length, int)
        return length


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

    def recur(
        self, recurrence: Recurrence, function: Callable[..., Any], arguments: Arguments
    ) -> Tensor:
        """The output of a recurrence, for arguments with all tokens of the step in one batch."""
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

    def recur(
        self, recurrence: Recurrence, function: Callable[..., Any], arguments: Arguments
    ) -> Tensor:
        """See `StepStates.recur`."""
        out, after = recurrence.run(function, arguments, None)
        self._note(StateShape(tuple(after.shape[1:]), after.dtype))
        return out

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

    def __init__(self, states: Mapping[int, list[Tensor]], batch: StateBatch) -> None:
        """states: by layer, `[num_blocks, *size]` each."""
        self._states = states
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
        before = stored.index_select(0, self._batch.sources)
        out, after = causal_conv(hidden_states[0].T, weight, bias, before, index)
        self._after.append((stored, after))
        return _activate(out.T[None], activation, hidden_states.dtype)

    def recur(
        self, recurrence: Recurrence, function: Callable[..., Any], arguments: Arguments
    ) -> Tensor:
        """See `StepStates.recur`."""
        stored = self._next()
        before = stored.index_select(0, self._batch.sources)
        lengths = self._batch.lengths
        if len(lengths) == 1:
            part = _select(recurrence, arguments, lengths[0])
            out, after = recurrence.run(function, part, before)
            self._after.append((stored, after))
            return _in_rows(recurrence, out)
        result: Tensor | None = None
        after = torch.empty_like(before)
        for equal in lengths:
            part = _select(recurrence, arguments, equal)
            out, after[equal.sequences] = recurrence.run(function, part, before[equal.sequences])
            flat = _in_rows(recurrence, out)
            if result is None:
                size = list(flat.shape)
                size[_time_dim(recurrence)] = recurrence.num_tokens(arguments)
                result = flat.new_empty(size)
            result.index_copy_(_time_dim(recurrence), equal.rows.flatten(), flat)
        assert result is not None, "a step has sequences"
        self._after.append((stored, after))
        return result

    def commit(self) -> None:
        """See `StepStates.commit`."""
        for stored, after in self._after:
            stored.index_copy_(0, self._batch.targets, after.to(stored.dtype))
        self._after.clear()

    def _next(self) -> Tensor:
        stored = self._states[self._layer][self._place]
        self._place += 1
        return stored


def _select(recurrence: Recurrence, arguments: Arguments, equal: EqualLengths) -> dict[str, Any]:
    """The arguments for these sequences, which become the batch."""
    size = equal.rows.shape
    part = dict(arguments)
    for name, dim in recurrence.time_dims.items():
        value = arguments.get(name)
        if value is not None:
            rows = value[0].index_select(dim - 1, equal.rows.flatten())
            part[name] = rows.unflatten(dim - 1, size).movedim(dim - 1, 0)
    return part


def _in_rows(recurrence: Recurrence, out: Tensor) -> Tensor:
    """The output of a batch of sequences as one sequence of their rows."""
    dim = _time_dim(recurrence)
    return out.movedim(0, dim - 1).flatten(dim - 1, dim)[None]


def _time_dim(recurrence: Recurrence) -> int:
    return next(iter(recurrence.time_dims.values()))


def _activate(out: Tensor, activation: str | None, dtype: torch.dtype) -> Tensor:
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(dtype)


def _power_of_two(number: int) -> int:
    """The least that is not below the number."""
    return 1 << (number - 1).bit_length()
