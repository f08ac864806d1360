"""RMSNorm of every row in one Triton kernel; see `rms_norm`."""
# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rms_norm import NormForm

ELEMENTS_PER_WARP = 256
MAX_WARPS = 16


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, form: NormForm) -> Tensor:
    """See `rms_norm.rms_norm`."""
    hidden = x.shape[-1]
    # Heads of a slice of a projection are two axes that cannot be viewed as one.
    rows = x.reshape(-1, *x.shape[-2:]) if x.ndim > 2 else x.reshape(-1, 1, hidden)
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    outer, inner, _ = rows.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    norm_kernel[(outer * inner,)](
        out,
        rows,
        weight,
        rows.stride(0),
        rows.stride(1),
        inner,
        eps,
        **norm_constants(hidden, form),
        **norm_options(hidden),
    )
    return out


def norm_constants(hidden: int, form: NormForm) -> dict[str, Any]:
    """The compile-time values of `norm_kernel`."""
    return {
        "HIDDEN": hidden,
        "BLOCK": triton.next_power_of_2(hidden),
        "ROUNDS_FIRST": form is NormForm.ROUNDED_FIRST,
        "OFFSET": 1.0 if form is NormForm.OFFSET else 0.0,
    }


def norm_options(hidden: int) -> dict[str, Any]:
    num_warps = triton.next_power_of_2(hidden) // ELEMENTS_PER_WARP
    return {"num_warps": min(max(num_warps, 1), MAX_WARPS)}


@triton.jit(do_not_specialize=["outer_stride", "inner"])  # they depend on the number of tokens
def norm_kernel(
    out_ptr: tl.tensor,  # [rows, HIDDEN]
    x_ptr: tl.tensor,  # [rows / inner, inner, HIDDEN]
    weight_ptr: tl.tensor,  # [HIDDEN]; None: no weight
    outer_stride: int,
    inner_stride: int,
    inner: int,
    eps: float,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    """Normalize one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    x_ptr += row // inner * outer_stride + row % inner * inner_stride
    x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    mean_square = tl.sum(x * x, axis=0) / HIDDEN
    y = x * tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        if ROUNDS_FIRST:
            y = y.to(out_ptr.dtype.element_ty).to(tl.float32) * weight
        else:
            y = y * (weight + OFFSET)
    out_ptr += row * HIDDEN
    tl.store(out_ptr + columns, y.to(out_ptr.dtype.element_ty), mask=inside)
