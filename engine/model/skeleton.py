"""A base model without weights, sufficient to describe the layers that an adapter must match."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...adapters.layout import BaseLayout, layout_to_json
from ..checkpoint.base_config import read_config_file
from ..checkpoint.text_part import is_composite
from ..checkpoint.weight_digests import end_digests
from ..checkpoint.weights import build_model, load_config
from ..errors import UnsupportedModel
from .admission import check_config
from .base_model import describe_layout, module_order, replace_linears
from .embedding_and_head import declare_ends
from .experts import are_served, replace_experts
from .load_quantization import LoadQuantization

UNKNOWN_BASE_ID = "unknown"
"""The identity of a base covers its checkpoint, which is not read here."""


class Skeleton(NamedTuple):
    """A model as described by its configuration."""

    layout_json: str
    dtype: str
    """The checkpoint's own, as its configuration names it; float32 where it does not."""


def read_skeleton(base: Path) -> Skeleton:
    """The skeleton of the model with this folder or `config.json`.

    Raises UnsupportedModel if there is none, or if it is not supported.
    """
    path = base if base.is_file() else base / "config.json"
    if not path.is_file():
        raise UnsupportedModel(f"{base} is no model's folder and no config.json")
    config = load_config(path)
    check_config(config, max_model_len=None)
    with torch.device("meta"):
        model = build_model(config)
    is_text_part = is_composite(read_config_file(path))
    layout = _layout(model, path.parent, is_text_part=is_text_part)
    return Skeleton(
        layout_to_json(layout), str(config.dtype or torch.float32).removeprefix("torch.")
    )


def _layout(model: PreTrainedModel, folder: Path, *, is_text_part: bool) -> BaseLayout:
    """The layout, computed by the same code as that of a served base."""
    order = module_order(model)
    bypass_experts(model)
    moe_layers = replace_experts(model)
    _load_ends(model, folder)
    return describe_layout(
        model,
        order,
        ends=declare_ends(model),
        linears=[
            fused.projection for fused in replace_linears(model, quantization=LoadQuantization())
        ],
        moe_layers=moe_layers,
        base_id=UNKNOWN_BASE_ID,
        digests=end_digests(model, folder),
        is_text_part=is_text_part,
    )


def bypass_experts(model: nn.Module) -> None:
    """Let the model run without weights, on whose values expert routing depends."""
    for module in model.modules():
        if are_served(module):
            module.__dict__["forward"] = lambda hidden_states, *_args, **_kwargs: hidden_states


def _load_ends(model: PreTrainedModel, folder: Path) -> None:
    """Load the weights of embedding and output head if they are in the folder.

    Intake uses them to distinguish an adapter's copy from a trained matrix.
    """
    table, linear = model.get_input_embeddings(), model.get_output_embeddings()
    are_tied = linear.weight is table.weight
    for name, module in model.named_modules():
        if module is table or (module is linear and not are_tied):
            weight = _find_weight(folder, f"{name}.weight", module.weight.shape)
            if weight is not None:
                module.weight = nn.Parameter(weight, requires_grad=False)
    if are_tied:
        linear.weight = table.weight


def _find_weight(folder: Path, name: str, shape: torch.Size) -> Tensor | None:
    """The stored tensor of this name, possibly without the prefix of the whole model."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                is_it = f".{name}".endswith(f".{key}")
                if is_it and file.get_slice(key).get_shape() == list(shape):
                    found: Tensor = file.get_tensor(key)
                    return found
    return None
