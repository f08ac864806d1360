"""The shapes of a run's steps, of the loaded base, and whether their memory is there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..memory.host_memory import status_bytes
from ..model.base_model import num_query_heads
from .base import TunableBase
from .errors import InsufficientTrainingMemory
from .messages import Open
from .step_shapes import Shapes

MIB = 1 << 20
_STATUS = Path("/proc/self/status")


def shapes_of(base: TunableBase, parameters: Iterable[Tensor]) -> Shapes:
    """Of this base and what is trained of it."""
    config: Any = base.model.config.get_text_config()
    modules = dict(base.model.named_modules())
    linears = [module for path, module in modules.items() if path in base.linears]
    return Shapes(
        linear_features=sum(map(_features, linears)),
        vocab_size=config.vocab_size,
        num_scores=num_query_heads(config),
        num_parameters=sum(each.numel() for each in parameters),
    )


def _features(linear: Any) -> int:
    """Inputs and outputs. Some types have them as the shape of the weight alone."""
    if hasattr(linear, "in_features"):
        return int(linear.in_features + linear.out_features)
    return sum(linear.weight.shape)


def limit_device_memory(order: Open) -> None:
    """Let torch allocate no more of the CUDA device than the order allows."""
    if order.max_device_bytes is None:
        return
    total_bytes = torch.cuda.get_device_properties(order.device).total_memory
    fraction = min(1.0, order.max_device_bytes / total_bytes)
    torch.cuda.set_per_process_memory_fraction(fraction, order.device)


def check_fits(needed_bytes: int, order: Open) -> None:
    """Raises InsufficientTrainingMemory if this does not fit beside what the process has now, in
    the memory that the order allows."""
    left = _left_bytes(order)
    if left is not None and needed_bytes > left:
        raise InsufficientTrainingMemory(
            f"a step may need {needed_bytes // MIB} MiB, and {max(0, left) // MIB} MiB are left; "
            "use a smaller `batch_size`, `lora.max_tokens` or `lora.rank`"
        )


def _left_bytes(order: Open) -> int | None:
    """None: nothing says how much."""
    if order.max_device_bytes is not None:
        return order.max_device_bytes - torch.cuda.memory_allocated(order.device)
    if order.max_memory_bytes is None or not _STATUS.exists():  # not Linux: the limit has to do
        return None
    return order.max_memory_bytes - status_bytes(_STATUS, "VmSize")
