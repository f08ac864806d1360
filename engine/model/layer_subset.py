"""A model that computes only some of its layers, for its own drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..config import EngineConfig, source_of
from ..errors import InvalidParameter, UnsupportedModel
from ..layer_numbers import parse_layers
from .attention_windows import LayerProbe
from .base_model import BaseModel
from .forward import run_model
from .layer_list import layer_list

EARLY_EXIT = "early_exit"
"""The source of proposers that keep the first layers: see `config.source_of`."""
SKIP = "skip"
"""The source of those that leave out the layers of their argument."""


class LayerSubset:
    """Lets a model compute some of its layers alone, and restores it afterwards.

    A layer that is left out passes its input on. Every other layer keeps its number, and so its
    window and its place in the KV cache; the model's norm and head follow the last.
    """

    def __init__(self, name: str, model: nn.Module, config: Any, layers: Sequence[int]) -> None:
        """`name`: of the proposer. `layers`: those that are computed, ascending. Raises
        UnsupportedModel if the model does not run its layers in sequence."""
        self.name = name
        self._refusal = f"speculation {name}: {config.model_type} does not run without some layers"
        found = layer_list(model, config)
        if found is None:
            raise UnsupportedModel(self._refusal)
        every = found[1]
        widths = self._widths(model, every)
        self._left_out: list[tuple[Any, Callable[..., Any]]] = [
            (layer, partial(_pass, width))
            for index, (layer, width) in enumerate(zip(every, widths, strict=True))
            if index not in layers
        ]
        with self.only():
            self._check(model, layers)

    @contextmanager
    def only(self) -> Iterator[None]:
        """The model's forwards inside compute these layers alone."""
        replaced = [layer.__dict__.get("forward") for layer, _ in self._left_out]
        for layer, passing in self._left_out:
            layer.__dict__["forward"] = passing
        try:
            yield
        finally:
            for (layer, _), forward in zip(self._left_out, replaced, strict=True):
                del layer.__dict__["forward"]
                if forward is not None:
                    layer.__dict__["forward"] = forward

    def _widths(self, model: nn.Module, layers: nn.ModuleList) -> list[int | None]:
        """The values in each layer's result; None: it is the hidden states themselves."""
        results: list[Any] = []
        with ExitStack() as hooks:
            for layer in layers:
                hook = layer.register_forward_hook(lambda *seen: results.append(seen[-1]))
                hooks.callback(hook.remove)
            self._check(model, range(len(layers)))
        return [None if isinstance(result, Tensor) else len(result) for result in results]

    def _check(self, model: nn.Module, layers: Sequence[int]) -> None:
        """Raises UnsupportedModel unless these layers attend in a forward, and in this order."""
        probe = LayerProbe()
        zero = torch.zeros(1, dtype=torch.int64, device=next(model.parameters()).device)
        try:
            run_model(model, probe, zero, zero, zero)
        except Exception as exc:  # any error of the model's code means that it needs the others
            raise UnsupportedModel(self._refusal) from exc
        if probe.calls != list(layers):
            raise UnsupportedModel(self._refusal)


def _pass(width: int | None, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    """The result of a layer that does nothing."""
    return hidden_states if width is None else (hidden_states, *[None] * (width - 1))


def drafting_layers(config: EngineConfig, num_layers: int) -> dict[str, Sequence[int]]:
    """By proposer, in the configuration's order, the layers that it computes of a base with so
    many; empty where no proposer computes some alone. Raises InvalidParameter."""
    entries = (entry.partition(":") for entry in config.speculation)
    return {
        name: _READERS[source_of(name)](argument, num_layers)
        for name, _, argument in entries
        if source_of(name) in _READERS
    }


def _first_layers(argument: str, num_layers: int) -> Sequence[int]:
    if not argument.isdecimal() or not 1 <= int(argument) < num_layers:
        raise InvalidParameter(
            "speculation", f"{EARLY_EXIT} takes a number of layers from 1 to {num_layers - 1}"
        )
    return range(int(argument))


def _other_layers(argument: str, num_layers: int) -> Sequence[int]:
    left_out = parse_layers(argument)
    if left_out[-1] >= num_layers:
        raise InvalidParameter(
            "speculation",
            f"{SKIP}: the base has no layer {left_out[-1]}, its layers are 0 to {num_layers - 1}",
        )
    if len(left_out) == num_layers:
        raise InvalidParameter("speculation", f"{SKIP} has to keep at least one layer")
    return [layer for layer in range(num_layers) if layer not in left_out]


_READERS: dict[str, Callable[[str, int], Sequence[int]]] = {
    EARLY_EXIT: _first_layers,
    SKIP: _other_layers,
}
"""By source."""


def open_subset(name: str, config: EngineConfig, base: BaseModel) -> LayerSubset:
    """That of a proposer of the configuration. All ranks of a base that is divided call it
    together. Raises InvalidParameter or UnsupportedModel."""
    layers = drafting_layers(config, base.config.num_hidden_layers)[name]
    return LayerSubset(name, base.model, base.config, layers)
