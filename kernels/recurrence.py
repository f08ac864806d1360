"""Recurrences of layers whose state is a matrix per head, over the rows of several sequences.

`plain_recurrence` defines the operation. Linear attention with the gated delta rule (Yang et al.,
2024) is one, also with a decay per key channel as in Kimi Linear, and so is Mamba-2 (Dao and Gu,
2024). A row's result depends on its own sequence alone, and not on the chunks it came in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import cpu_library
from .state_rows import StateRows

NORM_EPS = 1e-6
"""Added to the squares of keys and queries, as in `cpu/recurrence.h`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """The rows of one layer, and how they change its states and read them."""

    q: Tensor
    """`[num_rows, num_key_heads, key_dim]`; adjacent heads share one of them."""
    k: Tensor
    """Like q."""
    v: Tensor
    """`[num_rows, num_heads, value_dim]` in q's dtype."""
    log_decay: Tensor
    """fp32 `[num_rows, num_heads]`, or `[num_rows, num_heads, key_dim]`: per key channel."""
    beta: Tensor
    """fp32 `[num_rows, num_heads]`: the weight of a row."""
    skip: Tensor | None = None
    """fp32 `[num_heads]`: the part of its own value that an output gets."""
    is_delta_rule: bool = False
    """Whether a row adds what its value differs by from what the state has for its key."""
    is_normalized: bool = False
    """Whether keys and queries are divided by their lengths."""
    scale: float = 1.0
    """Of the queries."""
    out_dtype: torch.dtype = torch.float32

    @property
    def state_size(self) -> tuple[int, ...]:
        """`[num_heads, key_dim, value_dim]`, of each sequence."""
        return (self.v.shape[1], self.k.shape[2], self.v.shape[2])

    def new_outputs(self) -> Tensor:
        """Memory for what `advance` returns."""
        return torch.empty(self.v.shape, dtype=self.out_dtype, device=self.v.device)

    def advance(self, states: Tensor, rows: StateRows, after: Tensor) -> Tensor:
        """The outputs `[num_rows, num_heads, value_dim]`.

        states: fp32 `[num_states, *state_size]`; after: fp32 `[num_sequences, *state_size]`, gets
        the states after the rows.
        """
        if states.is_cuda:
            from . import recurrence_triton  # Triton is not installed everywhere

            return recurrence_triton.advance(self, states, rows, after)
        function = cpu_library.function("recur", self.q.dtype)
        if function is None:
            return plain_recurrence(self, states, rows, after)
        return _advance(function, self, states, rows, after)


def plain_recurrence(task: Recurrence, states: Tensor, rows: StateRows, after: Tensor) -> Tensor:
    """The definition of `Recurrence.advance`: the sequences go on row by row, all at once."""
    num_shared = task.v.shape[1] // task.q.shape[1]
    q, k = (x.float().repeat_interleave(num_shared, dim=1) for x in (task.q, task.k))
    if task.is_normalized:
        q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    decay = task.log_decay.exp().view(*task.log_decay.shape[:2], -1, 1)
    v, counts = task.v.float(), rows.bounds.diff()
    out = torch.empty(task.v.shape, device=task.v.device, dtype=torch.float32)
    after.copy_(states.index_select(0, rows.sources))
    for place in range(int(counts.max())):
        members = (counts > place).nonzero()[:, 0]
        row = rows.bounds[members] + place
        state, key, added = after[members] * decay[row], k[row, :, :, None], v[row]
        if task.is_delta_rule:
            added = added - (state * key).sum(dim=2)
        state = state + key * (added * task.beta[row, :, None])[:, :, None]
        out[row] = (state * q[row, :, :, None]).sum(dim=2) * task.scale
        after[members] = state
    if task.skip is not None:
        out += v * task.skip[:, None]
    return out.to(task.out_dtype)


def dense_heads(x: Tensor) -> Tensor:
    """`[num_rows, num_heads, dim]` of which each row is dense: x, or a copy."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


class _Task(ctypes.Structure):
    """Recurrence of `cpu/recurrence.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("bounds", "sources", "states", "log_decay")),
        *((name, ctypes.c_void_p) for name in ("beta", "skip", "out", "after")),
        *((name, ctypes.c_int64) for name in ("num_sequences", "num_heads", "num_key_heads")),
        *((name, ctypes.c_int64) for name in ("key_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, ctypes.c_int64) for name in ("decays_keys", "is_delta_rule", "is_normalized")),
        ("num_threads", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


def _advance(
    function: Callable[..., None], task: Recurrence, states: Tensor, rows: StateRows, after: Tensor
) -> Tensor:
    q, k, v = map(dense_heads, (task.q, task.k, task.v))
    out = torch.empty(v.shape, dtype=torch.float32)
    log_decay, beta, skip = task.log_decay.contiguous(), task.beta.contiguous(), task.skip
    assert states[0].is_contiguous(), "the library reads whole states"
    described = _Task(
        *(x.data_ptr() for x in (*rows, states, log_decay, beta)),
        None if skip is None else skip.data_ptr(),
        *(out.data_ptr(), after.data_ptr()),
        *(len(rows.sources), v.shape[1], q.shape[1], q.shape[2], v.shape[2]),
        *(q.stride(0), k.stride(0), v.stride(0)),
        *(log_decay.ndim == 3, task.is_delta_rule, task.is_normalized),
        torch.get_num_threads(),
        task.scale,
    )
    function(ctypes.byref(described), q.data_ptr(), k.data_ptr(), v.data_ptr())
    return out.to(task.out_dtype)
