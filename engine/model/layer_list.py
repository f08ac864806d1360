"""Where a model has its decoder's layers."""

from __future__ import annotations

from typing import Any

from torch import nn


def layer_list(model: nn.Module, config: Any) -> tuple[str, nn.ModuleList] | None:
    """The decoder's layers and their path: the outermost list of that length; None without one."""
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
            return path, module
    return None
