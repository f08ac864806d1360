"""Recurrences of all sequences in one Triton kernel; see `recurrence`.

A program keeps some columns of one head's state in registers and goes through the rows of one
sequence, which may be one token or a chunk of a prompt.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .recurrence import NORM_EPS, Recurrence, dense_heads
from .state_rows import StateRows, row_stride

MAX_BLOCK = 2048
"""The elements of a state that one warp keeps: 64 registers per thread."""
RECURRENCE_OPTIONS = {"num_warps": 1}


def advance(task: Recurrence, states: Tensor, rows: StateRows, after: Tensor) -> Tensor:
    """See `Recurrence.advance`."""
    q, k, v = map(dense_heads, (task.q, task.k, task.v))
    out = task.new_outputs()
    constants = recurrence_constants(task)
    num_blocks = triton.cdiv(v.shape[2], constants["BLOCK_VALUES"])
    recurrence_kernel[(v.shape[1] * num_blocks, len(rows.sources))](
        out,
        after,
        states,
        q,
        k,
        v,
        task.log_decay.contiguous(),
        task.beta.contiguous(),
        task.skip,
        rows.bounds,
        rows.sources,
        row_stride(q),
        row_stride(k),
        row_stride(v),
        task.scale,
        **constants,
        **RECURRENCE_OPTIONS,
    )
    return out


def recurrence_constants(task: Recurrence) -> dict[str, Any]:
    """The compile-time values of `recurrence_kernel`."""
    num_heads, key_dim, value_dim = task.state_size
    block_keys = triton.next_power_of_2(key_dim)
    return {
        "HEADS": num_heads,
        "SHARED": num_heads // task.q.shape[1],
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_KEYS": block_keys,
        "BLOCK_VALUES": min(max(MAX_BLOCK // block_keys, 1), triton.next_power_of_2(value_dim)),
        "DECAYS_KEYS": task.log_decay.ndim == 3,
        "IS_DELTA_RULE": task.is_delta_rule,
        "IS_NORMALIZED": task.is_normalized,
        "EPS": NORM_EPS,
    }


@triton.jit
def recurrence_kernel(
    out_ptr: tl.tensor,  # [num_rows, HEADS, VALUE_DIM]
    after_ptr: tl.tensor,  # [num_sequences, HEADS, KEY_DIM, VALUE_DIM]
    states_ptr: tl.tensor,  # [num_states, HEADS, KEY_DIM, VALUE_DIM]
    q_ptr: tl.tensor,  # [num_rows, HEADS / SHARED, KEY_DIM]
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,  # [num_rows, HEADS, VALUE_DIM]
    decay_ptr: tl.tensor,  # [num_rows, HEADS] or [num_rows, HEADS, KEY_DIM], logarithms
    beta_ptr: tl.tensor,  # [num_rows, HEADS]
    skip_ptr: tl.tensor,  # [HEADS]; None: no skip
    bounds_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    q_stride: int,
    k_stride: int,
    v_stride: int,
    scale: float,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    DECAYS_KEYS: tl.constexpr,
    IS_DELTA_RULE: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """All rows of one sequence, for some columns of one head's state."""
    NUM_BLOCKS: tl.constexpr = (VALUE_DIM + BLOCK_VALUES - 1) // BLOCK_VALUES
    head = tl.program_id(0) // NUM_BLOCKS
    sequence = tl.program_id(1).to(tl.int64)
    keys = tl.arange(0, BLOCK_KEYS)
    values = tl.program_id(0) % NUM_BLOCKS * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    inside = is_key[:, None] & is_value[None]
    offsets = (head * KEY_DIM + keys[:, None]) * VALUE_DIM + values[None]
    source = tl.load(sources_ptr + sequence)
    state_ptr = states_ptr + source * (HEADS * KEY_DIM * VALUE_DIM)
    state = tl.load(state_ptr + offsets, mask=inside, other=0.0)
    begin, end = tl.load(bounds_ptr + sequence), tl.load(bounds_ptr + sequence + 1)
    skip = 0.0
    if skip_ptr is not None:
        skip = tl.load(skip_ptr + head)
    for row in range(begin, end):
        key_offsets = head // SHARED * KEY_DIM + keys
        q = tl.load(q_ptr + row * q_stride + key_offsets, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + row * k_stride + key_offsets, mask=is_key, other=0.0).to(tl.float32)
        if IS_NORMALIZED:
            q = q / tl.sqrt_rn(tl.sum(q * q, axis=0) + EPS)
            k = k / tl.sqrt_rn(tl.sum(k * k, axis=0) + EPS)
        v_offsets = head * VALUE_DIM + values
        v = tl.load(v_ptr + row * v_stride + v_offsets, mask=is_value, other=0.0).to(tl.float32)
        at = row * HEADS + head
        if DECAYS_KEYS:
            decay = tl.load(decay_ptr + at * KEY_DIM + keys, mask=is_key, other=0.0)
            state = state * tl.exp(decay)[:, None]
        else:
            state = state * tl.exp(tl.load(decay_ptr + at))
        added = v
        if IS_DELTA_RULE:
            added = v - tl.sum(state * k[:, None], axis=0)
        added = added * tl.load(beta_ptr + at)
        state = state + k[:, None] * added[None]
        out = tl.sum(state * q[:, None], axis=0) * scale + v * skip
        out_offsets = at * VALUE_DIM + values
        tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=is_value)
    after_ptr += sequence * (HEADS * KEY_DIM * VALUE_DIM)
    tl.store(after_ptr + offsets, state, mask=inside)
