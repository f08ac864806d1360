"""A model that runs its first layers alone, for drafts of early exit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..config import EngineConfig
from ..errors import InvalidParameter, UnsupportedModel
from .attention_windows import LayerProbe
from .base_model import BaseModel
from .forward import run_model

EARLY_EXIT = "early_exit"
"""The proposer's name in `EngineConfig.speculation`."""


class FirstLayers:
    """Truncates a model to its first layers, and restores it afterwards.

    The output is that of the model with this number of layers: its norm and head follow the last.
    """

    name = EARLY_EXIT

    def __init__(self, model: nn.Module, config: Any, num_layers: int) -> None:
        """Raises UnsupportedModel if the model does not run its layers in sequence."""
        found = layer_list(model, config)
        if found is None:
            raise _cannot_exit(config)
        path, layers = found
        parent, _, self._name = path.rpartition(".")
        self._parent = model.get_submodule(parent)
        self._all, self._first = layers, layers[:num_layers]
        self._check(model, config)

    @contextmanager
    def only(self) -> Iterator[None]:
        """The model's forwards inside run these layers alone."""
        setattr(self._parent, self._name, self._first)
        try:
            yield
        finally:
            setattr(self._parent, self._name, self._all)

    def _check(self, model: nn.Module, config: Any) -> None:
        probe = LayerProbe()
        zero = torch.zeros(1, dtype=torch.int64, device=next(model.parameters()).device)
        try:
            with self.only():
                run_model(model, probe, zero, zero, zero)
        except Exception as exc:  # any error of the model's code means that it cannot exit early
            raise _cannot_exit(config) from exc
        if probe.calls != list(range(len(self._first))):
            raise _cannot_exit(config)


def layer_list(model: nn.Module, config: Any) -> tuple[str, nn.ModuleList] | None:
    """The decoder's layers and their path: the outermost list of that length; None without one."""
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
            return path, module
    return None


def _cannot_exit(config: Any) -> UnsupportedModel:
    return UnsupportedModel(
        f"speculation early_exit: {config.model_type} does not run its first layers alone"
    )


def exit_argument(config: EngineConfig) -> str | None:
    """The argument of the configuration's early exit; None without one."""
    entries = (entry.partition(":") for entry in config.speculation)
    return next((argument for name, _, argument in entries if name == EARLY_EXIT), None)


def num_exit_layers(config: EngineConfig) -> int:
    """The layers of the configuration's early exit, 0 without one."""
    argument = exit_argument(config)
    return int(argument) if argument and argument.isdecimal() else 0


def open_first_layers(argument: str, base: BaseModel) -> FirstLayers:
    """`argument`: of how many layers. All ranks of a base that is divided call it together. Raises
    InvalidParameter or UnsupportedModel."""
    num_layers = base.config.num_hidden_layers
    if not argument.isdecimal() or not 1 <= int(argument) < num_layers:
        raise InvalidParameter(
            "speculation", f"{EARLY_EXIT} takes a number of layers from 1 to {num_layers - 1}"
        )
    return FirstLayers(base.model, base.config, int(argument))
