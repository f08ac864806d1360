"""The base matmul of an MoE layer: each pair is multiplied by its expert's matrix.

On CUDA pairs with tiles are multiplied in one Triton launch. PyTorch's grouped matmul serves the
others in bf16. It cannot be captured everywhere: on some architectures it reads the ends of the
experts' pairs on the host.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .expert_pairs import ExpertPairs
from .packed_experts import PackedExperts

_WIDE_LOAD_BYTES = 16
_GROUPED_CAPABILITY = (8, 0)


def grouped_linear(
    x: Tensor,
    weight: Tensor | PackedExperts,
    pairs: ExpertPairs,
    *,
    bias: Tensor | None = None,
    is_transposed: bool = False,
) -> Tensor:
    """`x[p] @ W[expert of p].T + bias[expert of p]` for each pair p: `[num_pairs, out]` in the type
    of `weight`, of quantized experts in x's type.

    x: `[num_pairs, in]`, in the order of `pairs`.
    weight: `[experts, out, in]`, or `[experts, in, out]` if `is_transposed`; or quantized experts.
    bias: `[experts, out]`; the product is rounded before it is added.
    On CUDA, pairs with tiles wait for nothing, and no other pair changes a bit of a pair's result.
    """
    if isinstance(weight, PackedExperts):
        y: Tensor = weight(x, pairs)
        return y if bias is None else y.add_(bias[pairs.experts])
    x = x.to(weight.dtype)
    if pairs.tiles is not None and x.is_cuda:
        from .grouped_linear_triton import multiply_tiles  # Triton is not installed everywhere

        return multiply_tiles(x, weight, bias, pairs.tiles.base, is_transposed=is_transposed)
    matrices = weight if is_transposed else weight.transpose(1, 2)  # [experts, in, out]
    multiply = multiply_grouped if _has_grouped_kernel(x, weight) else multiply_each
    y = multiply(x, matrices, pairs)
    if bias is not None:
        y += bias[pairs.experts]
    return y


def multiply_grouped(x: Tensor, matrices: Tensor, pairs: ExpertPairs) -> Tensor:
    """One kernel for all experts. bf16 only."""
    return F.grouped_mm(x, matrices, offs=pairs.ends)


def multiply_each(x: Tensor, matrices: Tensor, pairs: ExpertPairs) -> Tensor:
    """One matmul per expert with any tokens."""
    y = x.new_empty(x.shape[0], matrices.shape[2])
    for expert, mine in pairs.runs:
        torch.mm(x[mine], matrices[expert], out=y[mine])
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
