"""The gated activation of an MLP: one Triton launch on CUDA, two calls on the CPU.

`plain_gated_activation` defines the operation.
"""

from __future__ import annotations

from enum import Enum, auto

import torch.nn.functional as F
from torch import Tensor


class Activation(Enum):
    SILU = auto()
    GELU_TANH = auto()
    """GELU in its approximation by tanh."""


def gated_activation(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """`activation(gate) * up` for `gate, up [..., width]`; new memory.

    The two may be slices of one projection's output, whose last axes are dense. On the CPU the
    result equals `plain_gated_activation` to the bit.
    """
    if not gate.is_cuda:
        # Not in gate's memory: the next matmul would copy that slice to make it contiguous.
        return _activated(gate, activation).mul_(up)
    from . import gated_activation_triton  # Triton is not installed everywhere

    return gated_activation_triton.gated_activation(gate, up, activation)


def plain_gated_activation(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The definition of `gated_activation`: the activated gate is rounded to its dtype."""
    return _activated(gate, activation) * up


def _activated(gate: Tensor, activation: Activation) -> Tensor:
    if activation is Activation.SILU:
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh")
