"""The gated activation of an MLP in one call of a kernel.

`plain_gated_activation` defines the operation.
"""

from __future__ import annotations

from enum import Enum, auto

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu_library


class Activation(Enum):
    SILU = auto()
    GELU_TANH = auto()
    """GELU in its approximation by tanh."""


def gated_activation(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """`activation(gate) * up` for `gate, up [..., width]`; new memory.

    The two may be slices of one projection's output.
    """
    if gate.is_cuda:
        from . import gated_activation_triton  # Triton is not installed everywhere

        return gated_activation_triton.gated_activation(gate, up, activation)
    function = cpu_library.function("gated_activation", gate.dtype)
    if function is None:
        return plain_gated_activation(gate, up, activation)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    size = gate.shape[-1]
    gate, up = _dense_rows(gate), _dense_rows(up)
    function(
        gate.data_ptr(),
        up.data_ptr(),
        out.data_ptr(),
        len(gate),
        size,
        gate.stride(0),
        up.stride(0),
        activation.value,
        torch.get_num_threads(),
    )
    return out


def _dense_rows(x: Tensor) -> Tensor:
    """`[num_rows, width]`: a view of a slice of a projection's output, a copy of what is not
    dense."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def plain_gated_activation(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The definition of `gated_activation`: the activated gate is rounded to its dtype."""
    is_silu = activation is Activation.SILU
    activated = F.silu(gate) if is_silu else F.gelu(gate, approximate="tanh")
    return activated * up
