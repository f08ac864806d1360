"""Rotary position embedding of queries and keys, on CUDA in one Triton launch.

`plain_rotary` defines the operation: the half-rotated form of Llama and most families, in which
element i of a head's first half is rotated with element i of its second half.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate `q, k [1, heads, num_tokens, dim]` by `cos, sin [1, num_tokens, dim]`, of one dtype.

    Returns new memory. The last axes of all are dense.
    """
    if not q.is_cuda:
        return plain_rotary(q, k, cos, sin)
    from . import rotary_triton  # Triton is not installed everywhere

    return rotary_triton.rotary(q, k, cos, sin)


def is_rotatable(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether these are arguments of `rotary`."""
    if q.ndim != 4 or k.ndim != 4 or q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    _, _, num_tokens, dim = q.shape
    return (
        q.shape[0] == k.shape[0] == 1
        and k.shape[2:] == q.shape[2:]
        and cos.shape == sin.shape == (1, num_tokens, dim)
        and dim % 2 == 0
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and q.stride(3) == k.stride(3) == cos.stride(2) == sin.stride(2) == 1
    )


def plain_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The definition of `rotary`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _half_rotated(q) * sin, k * cos + _half_rotated(k) * sin


def _half_rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
