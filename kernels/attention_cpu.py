"""Attention on the CPU by the library, which reads blocks in place: of sequences with few new
tokens, and in bf16 of whole prompts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .kv_groups import GroupedPages, num_value_groups
from .kv_pages import KvPages

if TYPE_CHECKING:
    from .attention import AttentionOptions, SequenceGroup

UNIT = 16
"""The library takes heads and blocks of multiples of this size: whole vectors of any processor."""


class _Group(ctypes.Structure):
    """AttentionGroup of `cpu/attention.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "positions", "tables")),
        *((name, ctypes.c_void_p) for name in ("block_positions", "hidden")),
        *((name, ctypes.c_int64) for name in ("num_sequences", "max_rows", "max_blocks")),
        ("num_threads", ctypes.c_int64),
    )


class _Layer(ctypes.Structure):
    """AttentionLayer of `cpu/attention.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("sinks", "slopes")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("block_size", "value_stride")),
        *((name, ctypes.c_int64) for name in ("token_stride", "head_stride")),
        *((name, ctypes.c_int64) for name in ("window", "is_chunked", "num_sink_positions")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class _GroupedMemory(ctypes.Structure):
    """GroupedMemory of `cpu/attention_groups.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "steps", "opened")),
        *((name, ctypes.c_int64) for name in ("num_blocks", "dim", "bits", "num_groups")),
    )


def attend_group(
    attend: Callable[..., None],
    q: Tensor,
    out: Tensor,
    keys: KvPages,
    values: KvPages,
    group: SequenceGroup,
    options: AttentionOptions,
) -> bool:
    """Write the group's rows of `out [num_tokens, num_heads, value_dim]` with `attend`, the
    library's function for q's dtype and for these pages. Those of `kv_groups` take groups of
    `attention_groups.by_block`.

    Returns False, without effect, for what the library does not serve: pages with a scale per
    token, blocks that are not adjacent, and other sizes.
    """
    if not are_served(q, keys, values):
        return False
    sinks = None if options.sinks is None else options.sinks.float().contiguous()
    layer = layer_of(q, keys, values, options, sinks)
    task = task_of(group)
    memory: tuple[object, object] = keys.data.data_ptr(), values.data.data_ptr()
    if isinstance(keys, GroupedPages) and isinstance(values, GroupedPages):
        memory = _memory(keys), _memory(values)
    attend(ctypes.byref(task), ctypes.byref(layer), q.data_ptr(), *memory, out.data_ptr())
    return True


def task_of(group: SequenceGroup) -> ctypes.Structure:
    """What the library gets of a group, whose tensors must outlive it."""
    parts = (
        *(group.rows, group.positions, group.block_tables),
        *(group.block_positions, group.hidden),
    )
    given = [part for part in parts if part is not None]
    assert all(part.is_contiguous() for part in given), "the library reads them row by row"
    return _Group(
        *(None if part is None else part.data_ptr() for part in parts),
        *(*group.rows.shape, group.block_tables.shape[1], torch.get_num_threads()),
    )


def layer_of(
    q: Tensor,
    keys: KvPages,
    values: KvPages,
    options: AttentionOptions,
    sinks: Tensor | None = None,
) -> ctypes.Structure:
    """What the library gets of a layer with queries like q. `sinks`: those of the options, fp32
    and dense."""
    window = options.window
    return _layer(
        None if sinks is None else sinks.data_ptr(),
        None if options.slopes is None else options.slopes.data_ptr(),
        *(q.shape[1], keys.num_heads, keys.dim, values.dim, keys.block_size),
        values.data.stride(2),
        *(q.stride(0), q.stride(1)),
        *((0, False) if window is None else (window.size, window.is_chunked)),
        options.num_sink_positions,
        *(options.scale, options.softcap or 0.0),
    )


def _memory(pages: GroupedPages) -> object:
    """What the library gets of keys or of values."""
    codes, steps = pages.tensors
    num_groups = 0 if pages.is_key else num_value_groups(pages.dim)
    memory = _GroupedMemory(
        *(codes.data_ptr(), steps.data_ptr(), pages.opened.data_ptr()),
        *(pages.blocks.num_blocks, pages.dim, pages.bits, num_groups),
    )
    return ctypes.byref(memory)


@lru_cache
def _layer(*fields: float | None) -> _Layer:
    return _Layer(*fields)


def are_served(q: Tensor, keys: KvPages, values: KvPages) -> bool:
    """Whether the library attends queries like q to these pages."""
    sizes = [keys.dim, values.dim, keys.block_size]
    if isinstance(keys, GroupedPages):
        dtype = keys.opened.dtype
        sizes.append(values.dim // num_value_groups(values.dim))
    elif keys.scales is None and keys.data.is_contiguous():
        dtype = keys.data.dtype
    else:
        return False
    return dtype is q.dtype and q.stride(2) == 1 and not any(size % UNIT for size in sizes)
