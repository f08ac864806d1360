"""Layers with states: convolutions and recurrences that go on from a sequence's state.

transformers' modules for linear attention and state spaces call functions of the module that
defines their family: one for the causal convolution and one for the recurrence. `replace_states`
puts others in their place. In a served step these compute all rows of the batch at once, each
sequence from its own state. Everything else, such as a dense reference, gets transformers' own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .forward import current_forward
from .recurrences import RECURRENCES

CONVOLUTION = "causal_conv1d_fn"
READ_WEIGHTS = {"mamba_selective_scan": "dt_proj"}
"""A linear layer of the modules that call this function, of which they read the weight."""


class ServedFunction:
    """Stands for transformers' function in the module that defines a family."""

    def __init__(self, name: str, own: Callable[..., Any]) -> None:
        self.own = own
        self._recurrence = RECURRENCES.get(name)
        # The plain function: the one around it would look for other libraries.
        self._signature = inspect.signature(inspect.unwrap(own))

    def __call__(self, *args: Any, **others: Any) -> Any:
        step = current_forward.get()
        if step is None:
            return self.own(*args, **others)
        assert step.states is not None, "the probe has found the layer"
        arguments = self._signature.bind(*args, **others).arguments
        arguments.pop("kwargs", None)
        if self._recurrence is None:
            return step.states.convolve(**arguments)
        change = self._recurrence.read(**arguments)
        return self._recurrence.result(step.states.recur(change))


def replace_states(model: nn.Module) -> None:
    """Let the model's layers with states go on from those of each sequence."""
    for module in state_modules(model):
        family = sys.modules[type(module).__module__]
        for name in _called(module):
            own = getattr(family, name)
            if not isinstance(own, ServedFunction):
                setattr(family, name, ServedFunction(name, own))
        module.register_forward_pre_hook(_enter)


def state_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that call one of these functions."""
    return (module for module in model.modules() if _called(module))


def reads_weight(model: nn.Module, name: str) -> bool:
    """Whether the module around this linear layer reads its weight instead of calling it."""
    parent, _, leaf = name.rpartition(".")
    called = _called(model.get_submodule(parent))
    return leaf in {READ_WEIGHTS.get(function) for function in called}


def _called(module: nn.Module) -> list[str]:
    """The functions with states that the module calls by name."""
    forward = inspect.unwrap(type(module).forward)
    if not hasattr(forward, "__code__"):
        return []
    return [name for name in forward.__code__.co_names if name in (CONVOLUTION, *RECURRENCES)]


def _enter(module: nn.Module, _args: Any) -> None:
    step = current_forward.get()
    if step is not None:
        assert step.states is not None, "the probe has found the layer"
        layer = module.layer_idx
        assert isinstance(layer, int)
        step.states.enter(layer, module)
