"""Rotates queries and keys in one Triton kernel; see `rotary`.

Products are rounded to the data's dtype before they are added, as in the definition. Their results
are equal in bf16 and fp16; in fp32 a multiplication may be fused with the addition.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROTARY_OPTIONS: dict[str, Any] = {"num_warps": 1}


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `rotary.rotary`."""
    num_tokens, dim = q.shape[2:]
    # Tokens before heads, which is how attention and the cache read them.
    q_out, k_out = (
        torch.empty((1, num_tokens, x.shape[1], dim), dtype=x.dtype, device=x.device)
        for x in (q, k)
    )
    rotary_kernel[(num_tokens, q.shape[1] + k.shape[1])](
        q_out,
        k_out,
        q,
        k,
        cos,
        sin,
        q.stride(2),
        q.stride(1),
        k.stride(2),
        k.stride(1),
        cos.stride(1),
        sin.stride(1),
        **rotary_constants(q.shape[1], k.shape[1], dim),
        **ROTARY_OPTIONS,
    )
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


def rotary_constants(num_heads: int, num_kv_heads: int, dim: int) -> dict[str, Any]:
    """The compile-time values of `rotary_kernel`."""
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HALF": dim // 2,
        "BLOCK": triton.next_power_of_2(dim // 2),
    }


@triton.jit
def rotary_kernel(
    q_out_ptr: tl.tensor,  # [num_tokens, NUM_HEADS, 2 * HALF]
    k_out_ptr: tl.tensor,  # [num_tokens, NUM_KV_HEADS, 2 * HALF]
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    cos_ptr: tl.tensor,  # [num_tokens, 2 * HALF]
    sin_ptr: tl.tensor,
    q_token_stride: int,
    q_head_stride: int,
    k_token_stride: int,
    k_head_stride: int,
    cos_stride: int,
    sin_stride: int,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Rotate one head of one token, of the queries or of the keys."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cos_ptr += token * cos_stride
    sin_ptr += token * sin_stride
    kv_head = head - NUM_HEADS
    q_out_ptr += (token * NUM_HEADS + head) * HALF * 2
    k_out_ptr += (token * NUM_KV_HEADS + kv_head) * HALF * 2
    q_ptr += token * q_token_stride + head * q_head_stride
    k_ptr += token * k_token_stride + kv_head * k_head_stride
    if kv_head < 0:
        _rotate(q_out_ptr, q_ptr, cos_ptr, sin_ptr, HALF, BLOCK)
    else:
        _rotate(k_out_ptr, k_ptr, cos_ptr, sin_ptr, HALF, BLOCK)


@triton.jit
def _rotate(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    dims = tl.arange(0, BLOCK)
    inside = dims < HALF
    first = tl.load(x_ptr + dims, mask=inside, other=0.0)
    second = tl.load(x_ptr + HALF + dims, mask=inside, other=0.0)
    first_cos = tl.load(cos_ptr + dims, mask=inside, other=0.0)
    second_cos = tl.load(cos_ptr + HALF + dims, mask=inside, other=0.0)
    first_sin = tl.load(sin_ptr + dims, mask=inside, other=0.0)
    second_sin = tl.load(sin_ptr + HALF + dims, mask=inside, other=0.0)
    first_out = _product(first, first_cos) - _product(second, first_sin)
    second_out = _product(second, second_cos) + _product(first, second_sin)
    tl.store(out_ptr + dims, first_out.to(x_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + HALF + dims, second_out.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _product(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    """The product as the data's dtype holds it, in fp32."""
    return (left.to(tl.float32) * right.to(tl.float32)).to(left.dtype).to(tl.float32)
