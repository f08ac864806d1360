"""The gated activation of an MLP, on CUDA in one Triton launch.

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

    The two may be slices of one projection's output.
    """
    if not gate.is_cuda:
        return plain_gated_activation(gate, up, activation)
    from . import gated_activation_triton  # Triton is not installed everywhere

    return gated_activation_triton.gated_activation(gate, up, activation)


def plain_gated_activation(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The definition of `gated_activation`: the activated gate is rounded to its dtype."""
    is_silu = activation is Activation.SILU
    activated = F.silu(gate) if is_silu else F.gelu(gate, approximate="tanh")
    return activated * up
