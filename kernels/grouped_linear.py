"""The base matmul of an MoE layer: each pair is multiplied by its expert's matrix."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .expert_pairs import ExpertPairs

_WIDE_LOAD_BYTES = 16
_GROUPED_CAPABILITY = (8, 0)


def grouped_linear(
    x: Tensor, weight: Tensor, pairs: ExpertPairs, *, is_transposed: bool = False
) -> Tensor:
    """`x[p] @ W[expert of p].T` for each pair p: `[num_pairs, out]` in the type of `weight`.

    x: `[num_pairs, in]`, in the order of `pairs`.
    weight: `[experts, out, in]`, or `[experts, in, out]` if `is_transposed`.
    """
    matrices = weight if is_transposed else weight.transpose(1, 2)  # [experts, in, out]
    x = x.to(weight.dtype)
    if _has_grouped_kernel(x, weight):
        return multiply_grouped(x, matrices, pairs)
    return multiply_each(x, matrices, pairs)


def multiply_grouped(x: Tensor, matrices: Tensor, pairs: ExpertPairs) -> Tensor:
    """One kernel for all experts, without synchronization. bf16 only."""
    return F.grouped_mm(x, matrices, offs=pairs.ends)


def multiply_each(x: Tensor, matrices: Tensor, pairs: ExpertPairs) -> Tensor:
    """One matmul per expert with any tokens."""
    y = x.new_empty(x.shape[0], matrices.shape[2])
    start = 0
    for expert, end in enumerate(pairs.host_ends):
        if end > start:
            torch.mm(x[start:end], matrices[expert], out=y[start:end])
        start = end
    return y


def _has_grouped_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether PyTorch's grouped matmul takes these; on the CPU it is no faster than a loop."""
    return (
        x.device.type == "cuda"
        and weight.dtype == torch.bfloat16
        and all(size * weight.itemsize % _WIDE_LOAD_BYTES == 0 for size in weight.shape[1:])
        and _is_capable(x.device)
    )


@cache
def _is_capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _GROUPED_CAPABILITY
