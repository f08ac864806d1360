"""Mamba's selective scan, which goes on from a state (Gu and Dao, 2023, algorithm 2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`hidden_states, dt, z [batch, channels, length]`, `A [channels, size]`, `B, C [batch, size,
    length]`, `D, delta_bias [channels]`, `initial_state [batch, channels, size]`; returns the
    outputs `[batch, channels, length]` and the state after them, fp32."""
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    decay = torch.exp(A[:, :, None] * dt[:, :, None])
    added = (dt * hidden_states.float())[:, :, None] * B[:, None].float()
    state = torch.zeros_like(decay[..., 0]) if initial_state is None else initial_state
    outputs = []
    for place in range(hidden_states.shape[2]):
        state = decay[..., place] * state + added[..., place]
        read = state.to(hidden_states.dtype) @ C[:, :, place, None]
        outputs.append(read[..., 0])
    out = torch.stack(outputs, dim=-1)
    if D is not None:
        out = out + hidden_states * D[None, :, None]
    if z is not None:
        out = out * F.silu(z)
    return out, state
