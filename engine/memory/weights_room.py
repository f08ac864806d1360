"""Whether the weights of a base fit, before they are read."""

from __future__ import annotations

import torch
from torch import nn

from ..config import GIB, EngineConfig
from ..errors import InsufficientMemory
from .device_memory import available_bytes


def check_weights_fit(
    config: EngineConfig, model: nn.Module, dtype: torch.dtype, device: torch.device
) -> None:
    """Raises InsufficientMemory if `model`'s parameters in this dtype take more than the memory
    that is free or that the operator allows. `model` may be on the meta device."""
    needed = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    free = available_bytes(device)
    limit = free if config.memory_bytes is None else min(free, config.memory_bytes)
    if needed <= limit:
        return
    has = f"{limit / GIB:.1f} GiB of memory are free"
    if limit < free:
        has = f"--memory-gib allows {limit / GIB:.1f} GiB"
    raise InsufficientMemory(
        f"Not enough memory: the weights of {config.model} need {needed / GIB:.1f} GiB in "
        f"{str(dtype).removeprefix('torch.')}, and {has}. `loraplex models check` says what fits "
        "with --quantize int8 or int4."
    )
