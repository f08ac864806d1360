"""The adapter that is trained: PEFT's LoRA around the base."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from ...adapters.durable import sync_directory, sync_tree
from .base import TunableBase
from .errors import InvalidRecipe
from .messages import Recipe

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_UNFINISHED = ".unfinished"


def add_adapter(base: TunableBase, recipe: Recipe) -> Any:
    """The PEFT model, in which nothing but the adapter is trained. Its first values depend on the
    seed alone. Raises InvalidRecipe if no linear layer of the base has a target's name."""
    torch.manual_seed(recipe.seed)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        lora_dropout=0.0,
        target_modules=list(recipe.targets) or "all-linear",
        use_rslora=recipe.is_rslora,
        use_dora=recipe.is_dora,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in base.model.modules()),
    )
    try:
        return get_peft_model(base.model, config)
    except ValueError as exc:
        raise InvalidRecipe(f"the recipe does not fit the base: {exc}") from exc


def trained_parameters(model: Any) -> dict[str, Tensor]:
    """By name."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def save_adapter(model: Any, folder: Path, *, base_name: str) -> None:
    """Write the adapter's two files into the folder, the weights first. They are on the disk then.

    base_name: what the adapter says about its base: a name, no path of this machine.
    """
    unfinished, path = folder / _UNFINISHED, folder / "adapter"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    weights = get_peft_model_state_dict(model, save_embedding_layers=False)
    contents = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(contents, unfinished / WEIGHTS_FILE, metadata={"format": "pt"})
    config = model.peft_config["default"]
    config.base_model_name_or_path = base_name
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)  # of a set: else in any order
    config.save_pretrained(str(unfinished))
    _publish(unfinished, path)
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        (path / name).replace(folder / name)
    path.rmdir()
    sync_directory(folder)


def _publish(unfinished: Path, path: Path) -> None:
    """Bring a folder and its files to the disk, and give it its name. Replaces one of the same
    name."""
    sync_tree(unfinished)
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)
    sync_directory(path.parent)
