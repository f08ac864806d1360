"""Which matrices are quantized: those of linear layers and experts of the decoder's layers that the
files hold as a tensor each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from ..checkpoint.stored_tensors import StoredTensor
from ..checkpoint.stored_weights import StoredWeight, stored_weight
from ..errors import InvalidParameter, UnsupportedModel
from ..exclusion import excluded_layers
from .decoder_walk import DecoderWalk
from .layer_experts import LayerExperts, find_layer_experts
from .recipe import Recipe

_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Their names in all models. What they choose depends on small differences."""
_EXPERTS_PATTERN = r"re:.*\.experts(\..*)?$"
"""All experts, in compressed-tensors' notation."""


class LayerMatrices(NamedTuple):
    """Those of one decoder layer."""

    linears: Mapping[str, nn.Module]
    """Quantized linear layers, by their paths in the model."""
    experts: Set[str]
    """The paths in the files of quantized matrices of experts."""
    stored_linears: Mapping[str, nn.Module]
    """All whose weights are left in the files: these, and those that stay as they are."""
    stored_experts: Sequence[LayerExperts]
    """All that are left in the files."""

    @property
    def stored_names(self) -> set[str]:
        """The tensors that quantized ones replace."""
        return {
            *(stored_name(module) for module in self.linears.values()),
            *(f"{path}.weight" for path in self.experts),
        }


class Matrices(NamedTuple):
    """Those of a model."""

    layers: Sequence[LayerMatrices]
    ignored: Sequence[str]
    """Linear layers, experts and routers that stay as they are, in compressed-tensors' notation."""

    @property
    def stored_names(self) -> set[str]:
        """The tensors that quantized ones replace."""
        return {name for layer in self.layers for name in layer.stored_names}


def stored_name(module: nn.Module) -> str:
    """The name of the tensor in the files that is this quantized layer's weight."""
    stored = stored_weight(module)
    assert isinstance(stored, StoredWeight)
    return stored.name


def choose_matrices(
    model: PreTrainedModel, walk: DecoderWalk, stored: Mapping[str, StoredTensor], recipe: Recipe
) -> Matrices:
    """`stored`: the tensors of the model's files.

    Raises InvalidParameter for a pattern or a group size that does not fit the model, and
    UnsupportedModel if nothing can be quantized.
    """
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    experts = [each for each in find_layer_experts(model) if each.path.startswith(f"{walk.path}.")]
    expert_matrices = {path: m for each in experts for path, m in each.matrices.items()}
    inputs = {
        name: module.in_features
        for name, module in linears.items()
        if _is_quantizable(name, module, walk.path)
    }
    inputs |= {path: matrix.shape[1] for path, matrix in expert_matrices.items()}
    if not inputs:
        raise UnsupportedModel(
            f"{model.config.model_type} has no linear layers in its files that could be quantized"
        )
    excluded = excluded_layers(list(inputs), recipe.exclude, param="exclude")
    chosen = {path: size for path, size in inputs.items() if path not in excluded}
    _check_groups(chosen, recipe)
    ignored = [path for path in (*linears, *expert_matrices) if path not in chosen]
    ignored += _routers(stored, besides=ignored) + _whole_experts(model, experts)
    layers = []
    for index in range(len(walk.layers)):
        prefix = f"{walk.path}.{index}."
        own = {name: module for name, module in linears.items() if name.startswith(prefix)}
        own_experts = [each for each in experts if each.path.startswith(prefix)]
        layers.append(
            LayerMatrices(
                {name: module for name, module in own.items() if name in chosen},
                {path for each in own_experts for path in each.matrices if path in chosen},
                {name: module for name, module in own.items() if stored_weight(module)},
                own_experts,
            )
        )
    return Matrices(layers, ignored)


def _routers(stored: Mapping[str, StoredTensor], *, besides: Sequence[str]) -> list[str]:
    """By their paths in the files. Most are no linear layers in transformers, but in vLLM."""
    paths = {name.removesuffix(".weight"): len(tensor.shape) for name, tensor in stored.items()}
    return [
        path
        for path, num_dims in paths.items()
        if num_dims == 2 and path.rpartition(".")[2] in _ROUTERS and path not in besides
    ]


def _whole_experts(model: PreTrainedModel, experts: Sequence[LayerExperts]) -> list[str]:
    """Those of which nothing can be quantized, in compressed-tensors' notation."""
    divided = {each.path for each in experts if each.matrices}
    whole = [
        path
        for path, module in model.named_modules()
        if path.endswith(".experts")
        and path not in divided
        and any(True for _ in module.parameters(recurse=False))
    ]
    return whole if divided or not whole else [_EXPERTS_PATTERN]


def _is_quantizable(name: str, module: nn.Module, path: str) -> bool:
    stored = stored_weight(module)
    return (
        name.startswith(f"{path}.")
        and not _ROUTERS.intersection(name.split("."))
        and isinstance(stored, StoredWeight)
        and stored.name.endswith(".weight")
    )


def _check_groups(inputs: Mapping[str, int], recipe: Recipe) -> None:
    for path, in_features in inputs.items():
        if in_features % recipe.group(in_features):
            raise InvalidParameter(
                "group_size",
                f"{recipe.group_size} does not divide the {in_features} inputs of {path}: "
                "give a divisor, or 0 for a scale per output",
            )
