"""Mamba's selective scan over the rows of several sequences (Gu and Dao, 2023, algorithm 2).

`plain_selective_scan` defines the operation. Each channel has a state of its own, of which each
element decays in its own way. A row's result depends on its own sequence alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu_library
from .state_rows import StateRows


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveScan:
    """The rows of one layer, and how they change its states and read them."""

    x: Tensor
    """`[num_rows, num_channels]`: what is added to the states."""
    b: Tensor
    """`[num_rows, size]` in x's dtype: where it is added."""
    c: Tensor
    """`[num_rows, size]` in x's dtype: where the states are read."""
    steps: Tensor
    """fp32 `[num_rows, num_channels]`: the step in time, A's and x's factor."""
    rates: Tensor
    """fp32 `[num_channels, size]`: A, the logarithm of the decay in a unit of time."""
    skip: Tensor | None = None
    """fp32 `[num_channels]`: the part of its own input that an output gets."""
    gate: Tensor | None = None
    """`[num_rows, num_channels]` in x's dtype: its SiLU multiplies the outputs."""

    @property
    def state_size(self) -> tuple[int, ...]:
        """`[num_channels, size]`, of each sequence."""
        return tuple(self.rates.shape)

    def new_outputs(self) -> Tensor:
        """Memory for what `advance` returns."""
        return torch.empty(self.x.shape, dtype=torch.float32, device=self.x.device)

    def advance(self, states: Tensor, rows: StateRows, after: Tensor) -> Tensor:
        """The outputs, fp32 `[num_rows, num_channels]`; as `Recurrence.advance`."""
        if states.is_cuda:
            from . import selective_scan_triton  # Triton is not installed everywhere

            return selective_scan_triton.advance(self, states, rows, after)
        function = cpu_library.function("selective_scan", self.x.dtype)
        if function is None:
            return plain_selective_scan(self, states, rows, after)
        return _advance(function, self, states, rows, after)


def plain_selective_scan(
    task: SelectiveScan, states: Tensor, rows: StateRows, after: Tensor
) -> Tensor:
    """The definition of `SelectiveScan.advance`: the sequences go on row by row, all at once."""
    x, b, c, counts = task.x.float(), task.b.float(), task.c.float(), rows.bounds.diff()
    out = task.new_outputs()
    after.copy_(states.index_select(0, rows.sources))
    for place in range(int(counts.max())):
        members = (counts > place).nonzero()[:, 0]
        row = rows.bounds[members] + place
        step = task.steps[row, :, None]
        state = after[members] * (task.rates * step).exp()
        state = state + step * x[row, :, None] * b[row, None]
        out[row] = (state * c[row, None]).sum(dim=2)
        after[members] = state
    if task.skip is not None:
        out += x * task.skip
    return out if task.gate is None else out * F.silu(task.gate.float())


def dense_rows(x: Tensor) -> Tensor:
    """`[num_rows, size]` of which each row is dense: x, or a copy."""
    return x if x.stride(1) == 1 else x.contiguous()


class _Task(ctypes.Structure):
    """SelectiveScan of `cpu/selective_scan.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("bounds", "sources", "states", "rates", "steps")),
        *((name, ctypes.c_void_p) for name in ("skip", "out", "after")),
        *((name, ctypes.c_int64) for name in ("num_sequences", "num_channels", "size")),
        *((name, ctypes.c_int64) for name in ("x_stride", "gate_stride", "b_stride", "c_stride")),
        ("num_threads", ctypes.c_int64),
    )


def _advance(
    function: Callable[..., None],
    task: SelectiveScan,
    states: Tensor,
    rows: StateRows,
    after: Tensor,
) -> Tensor:
    x, b, c = map(dense_rows, (task.x, task.b, task.c))
    gate = None if task.gate is None else dense_rows(task.gate)
    steps, rates, skip = task.steps.contiguous(), task.rates.contiguous(), task.skip
    out = task.new_outputs()
    assert states[0].is_contiguous(), "the library reads whole states"
    described = _Task(
        *(tensor.data_ptr() for tensor in (*rows, states, rates, steps)),
        None if skip is None else skip.data_ptr(),
        *(out.data_ptr(), after.data_ptr()),
        *(len(rows.sources), *rates.shape),
        *(x.stride(0), 0 if gate is None else gate.stride(0), b.stride(0), c.stride(0)),
        torch.get_num_threads(),
    )
    function(
        ctypes.byref(described),
        x.data_ptr(),
        None if gate is None else gate.data_ptr(),
        b.data_ptr(),
        c.data_ptr(),
    )
    return out
