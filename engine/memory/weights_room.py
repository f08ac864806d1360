"""Whether the weights of a base fit, before they are read."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..config import GIB, EngineConfig, Quantization
from ..errors import InsufficientMemory
from ..model.expected_rounded import ExpectedRounded
from ..model.latent_attention import replace_latents
from ..model.rounded_linears import rounded_format
from .device_memory import available_bytes


def check_weights_fit(
    config: EngineConfig, model: PreTrainedModel, dtype: torch.dtype, device: torch.device
) -> None:
    """Raises InsufficientMemory if `model`'s parameters in this dtype, and their rounded copy for
    drafts, take more than the memory that is free or that the operator allows.

    `model` may be on the meta device, and does not run any more.
    """
    needed = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    weight_format, copy = rounded_format(config), ""
    if weight_format is not None:
        rounded = ExpectedRounded(weight_format, dtype, device.type)
        needed += rounded.linears_bytes(model, replace_latents(model, has_values=False))
        needed += rounded.experts_bytes(model)
        if config.embedding_quantization is Quantization.NONE:
            needed += rounded.head_bytes(model)
        copy = f" and a copy in {weight_format} for drafts"
    free = available_bytes(device)
    limit = free if config.memory_bytes is None else min(free, config.memory_bytes)
    if needed <= limit:
        return
    has = f"{limit / GIB:.1f} GiB of memory are free"
    if limit < free:
        has = f"--memory-gib allows {limit / GIB:.1f} GiB"
    raise InsufficientMemory(
        f"Not enough memory: the weights of {config.model} need {needed / GIB:.1f} GiB in "
        f"{str(dtype).removeprefix('torch.')}{copy}, and {has}. `loraplex models check` says what "
        "fits with --quantize int8 or int4."
    )
