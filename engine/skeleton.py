"""A base model without its weights: enough to say what an adapter must fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..adapters.layout import BaseLayout, layout_to_json
from .admission import check_config
from .base_model import load_config, refused_modules, replace_linears
from .config import Quantization
from .errors import UnsupportedModel

UNKNOWN_BASE_ID = "unknown"
"""The identity of a base covers its checkpoint, which is not read here."""


class Skeleton(NamedTuple):
    """What a configuration says about its model."""

    layout_json: str
    dtype: str
    """The checkpoint's own, as its configuration names it; float32 where it does not."""


def read_skeleton(base: Path) -> Skeleton:
    """The skeleton of the model whose folder or `config.json` this is.

    Raises UnsupportedModel if there is none, or if it would not be served.
    """
    path = base if base.is_file() else base / "config.json"
    if not path.is_file():
        raise UnsupportedModel(f"{base} is no model's folder and no config.json")
    config = load_config(path)
    check_config(config, max_model_len=None)
    layout = _layout(_build(config))
    return Skeleton(
        layout_to_json(layout), str(config.dtype or torch.float32).removeprefix("torch.")
    )


def _build(config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", trust_remote_code=False
        )
    return model


def _layout(model: PreTrainedModel) -> BaseLayout:
    """The layout, made by what makes that of a served base."""
    projections = replace_linears(model, quantization=Quantization.NONE)
    return BaseLayout(
        base_id=UNKNOWN_BASE_ID,
        projections=tuple(fused.projection for fused in projections),
        refused=dict(refused_modules(model)),
    )
