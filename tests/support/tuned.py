"""Small models with random adapters, computed by PEFT."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_PREFIX = "base_model.model."
_WRAPPER = ".base_layer"
"""What PEFT puts around a module once for each of its parameters but one."""


def make_tuned(base: nn.Module, *, seed: int, scale: float = 0.2, **lora: Any) -> Any:
    """`base` under a random adapter of this LoraConfig: both A and B are drawn."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": [], **lora})
    tuned = get_peft_model(base, config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return tuned


def adapted_layers(tuned: Any) -> dict[str, Any]:
    """Slice name to the PEFT layer that adapts it."""
    layers = {}
    for name, module in tuned.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        path = name.removeprefix(_PREFIX)
        while path.endswith(_WRAPPER):
            path = path.removesuffix(_WRAPPER)
        parameter = getattr(module, "parameter_name", "weight")
        layers[path if parameter == "weight" else f"{path}.{parameter}"] = module
    return layers
