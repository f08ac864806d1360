"""Which linear layers are quantized: those of the decoder's layers that the files hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from ..checkpoint.stored_weights import StoredWeight, stored_weight
from ..errors import InvalidParameter, UnsupportedModel
from ..exclusion import excluded_layers
from .decoder_walk import DecoderWalk
from .recipe import Recipe

_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Their names in all models. What they choose depends on small differences."""
_EXPERTS_PATTERN = r"re:.*\.experts(\..*)?$"
"""Experts in one tensor for all, in compressed-tensors' notation."""


class LayerMatrices(NamedTuple):
    """Those of one decoder layer, by their paths in the model."""

    quantized: Mapping[str, nn.Module]
    stored: Mapping[str, nn.Module]
    """All whose weights are left in the files: these, and those that stay as they are."""


class Matrices(NamedTuple):
    """Those of a model."""

    layers: Sequence[LayerMatrices]
    ignored: Sequence[str]
    """Linear layers that stay as they are, in compressed-tensors' notation."""

    @property
    def stored_names(self) -> set[str]:
        """The tensors that quantized ones replace."""
        return {stored_name(module) for layer in self.layers for module in layer.quantized.values()}


def stored_name(module: nn.Module) -> str:
    """The name of the tensor in the files that is this quantized layer's weight."""
    stored = stored_weight(module)
    assert isinstance(stored, StoredWeight)
    return stored.name


def choose_matrices(model: PreTrainedModel, walk: DecoderWalk, recipe: Recipe) -> Matrices:
    """Raises InvalidParameter for a pattern or a group size that does not fit the model, and
    UnsupportedModel if nothing can be quantized."""
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    chosen = [name for name in linears if _is_quantizable(name, linears[name], walk.path)]
    if not chosen:
        raise UnsupportedModel(
            f"{model.config.model_type} has no linear layers in its files that could be quantized"
        )
    excluded = excluded_layers(chosen, recipe.exclude, param="exclude")
    chosen = [name for name in chosen if name not in excluded]
    _check_groups({name: linears[name] for name in chosen}, recipe)
    ignored = [name for name in linears if name not in set(chosen)]
    if any(name.endswith(".experts") for name, _ in model.named_modules()):
        ignored.append(_EXPERTS_PATTERN)
    layers = []
    for index in range(len(walk.layers)):
        own = {n: m for n, m in linears.items() if n.startswith(f"{walk.path}.{index}.")}
        layers.append(
            LayerMatrices(
                {name: module for name, module in own.items() if name in set(chosen)},
                {name: module for name, module in own.items() if stored_weight(module)},
            )
        )
    return Matrices(layers, ignored)


def _is_quantizable(name: str, module: nn.Module, path: str) -> bool:
    stored = stored_weight(module)
    return (
        name.startswith(f"{path}.")
        and not _ROUTERS.intersection(name.split("."))
        and isinstance(stored, StoredWeight)
        and stored.name.endswith(".weight")
    )


def _check_groups(linears: Mapping[str, nn.Linear], recipe: Recipe) -> None:
    for name, module in linears.items():
        if module.in_features % recipe.group(module.in_features):
            raise InvalidParameter(
                "group_size",
                f"{recipe.group_size} does not divide the {module.in_features} inputs of {name}: "
                "give a divisor, or 0 for a scale per output",
            )
