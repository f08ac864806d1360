"""The selective scan of all sequences in one Triton kernel; see `selective_scan`.

A program keeps the states of some channels in registers and goes through the rows of one sequence.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .selective_scan import SelectiveScan, dense_rows
from .state_rows import StateRows, row_stride

MAX_BLOCK = 512
"""The elements of states that one warp keeps: 16 registers per thread, and as many for rates."""
SCAN_OPTIONS = {"num_warps": 1}


def advance(task: SelectiveScan, states: Tensor, rows: StateRows, after: Tensor) -> Tensor:
    """See `SelectiveScan.advance`."""
    x, b, c = map(dense_rows, (task.x, task.b, task.c))
    gate = None if task.gate is None else dense_rows(task.gate)
    out = task.new_outputs()
    constants = scan_constants(task)
    num_blocks = triton.cdiv(x.shape[1], constants["BLOCK_CHANNELS"])
    scan_kernel[(num_blocks, len(rows.sources))](
        out,
        after,
        states,
        x,
        gate,
        b,
        c,
        task.steps.contiguous(),
        task.rates.contiguous(),
        task.skip,
        rows.bounds,
        rows.sources,
        row_stride(x),
        0 if gate is None else row_stride(gate),
        row_stride(b),
        row_stride(c),
        **constants,
        **SCAN_OPTIONS,
    )
    return out


def scan_constants(task: SelectiveScan) -> dict[str, Any]:
    """The compile-time values of `scan_kernel`."""
    channels, size = task.state_size
    block_size = triton.next_power_of_2(size)
    return {
        "CHANNELS": channels,
        "SIZE": size,
        "BLOCK_CHANNELS": max(MAX_BLOCK // block_size, 1),
        "BLOCK_SIZE": block_size,
    }


@triton.jit
def scan_kernel(
    out_ptr: tl.tensor,  # [num_rows, CHANNELS]
    after_ptr: tl.tensor,  # [num_sequences, CHANNELS, SIZE]
    states_ptr: tl.tensor,  # [num_states, CHANNELS, SIZE]
    x_ptr: tl.tensor,  # [num_rows, CHANNELS]
    gate_ptr: tl.tensor,  # [num_rows, CHANNELS]; None: no gate
    b_ptr: tl.tensor,  # [num_rows, SIZE]
    c_ptr: tl.tensor,  # [num_rows, SIZE]
    steps_ptr: tl.tensor,  # [num_rows, CHANNELS]
    rates_ptr: tl.tensor,  # [CHANNELS, SIZE]
    skip_ptr: tl.tensor,  # [CHANNELS]; None: no skip
    bounds_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    x_stride: int,
    gate_stride: int,
    b_stride: int,
    c_stride: int,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """All rows of one sequence, for some channels."""
    sequence = tl.program_id(1).to(tl.int64)
    channels = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    elements = tl.arange(0, BLOCK_SIZE)
    is_channel, is_element = channels < CHANNELS, elements < SIZE
    inside = is_channel[:, None] & is_element[None]
    offsets = channels[:, None] * SIZE + elements[None]
    source = tl.load(sources_ptr + sequence)
    state = tl.load(states_ptr + source * (CHANNELS * SIZE) + offsets, mask=inside, other=0.0)
    rates = tl.load(rates_ptr + offsets, mask=inside, other=0.0)
    begin, end = tl.load(bounds_ptr + sequence), tl.load(bounds_ptr + sequence + 1)
    for row in range(begin, end):
        x = tl.load(x_ptr + row * x_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + row * b_stride + elements, mask=is_element, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + row * c_stride + elements, mask=is_element, other=0.0).to(tl.float32)
        step = tl.load(steps_ptr + row * CHANNELS + channels, mask=is_channel, other=0.0)
        state = state * tl.exp(rates * step[:, None]) + (step * x)[:, None] * b[None]
        out = tl.sum(state * c[None], axis=1)
        if skip_ptr is not None:
            out += x * tl.load(skip_ptr + channels, mask=is_channel, other=0.0)
        if gate_ptr is not None:
            gate_at = gate_ptr + row * gate_stride + channels
            gate = tl.load(gate_at, mask=is_channel, other=0.0).to(tl.float32)
            out *= gate / (1.0 + tl.exp(-gate))
        tl.store(out_ptr + row * CHANNELS + channels, out, mask=is_channel)
    after_ptr += sequence * (CHANNELS * SIZE)
    tl.store(after_ptr + offsets, state, mask=inside)
