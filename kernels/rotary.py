"""Rotary position embedding of queries and keys in calls of a kernel.

`plain_rotary` defines the operation: the half-rotated form of Llama and most families, in which
element i of a head's first half is rotated with element i of its second half.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import cpu_library


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate `q, k [1, heads, num_tokens, dim]` by `cos, sin [1, num_tokens, dim]`, of one dtype.

    Returns new memory. The last axes of all are dense.
    """
    if q.is_cuda:
        from . import rotary_triton  # Triton is not installed everywhere

        return rotary_triton.rotary(q, k, cos, sin)
    function = cpu_library.function("rotary", q.dtype)
    if function is None:
        return plain_rotary(q, k, cos, sin)
    cos, sin = cos.contiguous(), sin.contiguous()
    return _rotated(function, q, cos, sin), _rotated(function, k, cos, sin)


def _rotated(function: Callable[..., None], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x rotated on the CPU; each token's heads are adjacent in memory, as attention reads them."""
    _, num_heads, num_tokens, dim = x.shape
    out = x.new_empty(1, num_tokens, num_heads, dim)
    function(
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
        num_tokens,
        num_heads,
        dim,
        x.stride(2),
        x.stride(1),
        torch.get_num_threads(),
    )
    return out.transpose(1, 2)


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
