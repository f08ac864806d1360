"""The gated activation of an MLP in one Triton kernel; see `gated_activation`."""
# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gated_activation import Activation

MAX_BLOCK = 1024
GATED_OPTIONS: dict[str, Any] = {"num_warps": 4}


def gated_activation(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """See `gated_activation.gated_activation`."""
    width = gate.shape[-1]
    gates, ups = (_dense_rows(x.reshape(-1, width)) for x in (gate, up))
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    constants = gated_constants(width, activation)
    gated_kernel[(len(gates), triton.cdiv(width, constants["BLOCK"]))](
        out, gates, ups, gates.stride(0), ups.stride(0), **constants, **GATED_OPTIONS
    )
    return out


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def gated_constants(width: int, activation: Activation) -> dict[str, Any]:
    """The compile-time values of `gated_kernel`."""
    return {
        "WIDTH": width,
        "BLOCK": min(triton.next_power_of_2(width), MAX_BLOCK),
        "IS_GELU": activation is Activation.GELU_TANH,
    }


@triton.jit
def gated_kernel(
    out_ptr: tl.tensor,  # [rows, WIDTH]
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    gate_stride: int,
    up_stride: int,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
) -> None:
    """A block of columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    slope = gate
    if IS_GELU:
        # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)), with z = sqrt(2 / pi) (x + 0.044715 x^3)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    activated = gate / (1.0 + tl.exp(-slope))
    activated = activated.to(out_ptr.dtype.element_ty).to(tl.float32)
    out = (activated * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + columns, out, mask=inside)
