"""Attention of sequences with few new tokens on the CPU: the library reads blocks in place."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .kv_pages import KvPages

if TYPE_CHECKING:
    from .attention import AttentionOptions, SequenceGroup

UNIT = 16
"""The library takes heads and blocks of multiples of this size: whole vectors of any processor."""


class _Group(ctypes.Structure):
    """AttentionGroup of `cpu/attention.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "positions", "tables", "block_positions")),
        *((name, ctypes.c_int64) for name in ("num_sequences", "max_rows", "max_blocks")),
        ("num_threads", ctypes.c_int64),
    )


class _Layer(ctypes.Structure):
    """AttentionLayer of `cpu/attention.h`."""

    _fields_ = (
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("block_size", "value_stride")),
        *((name, ctypes.c_int64) for name in ("token_stride", "head_stride")),
        *((name, ctypes.c_int64) for name in ("window", "num_sink_positions")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
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
    library's function for q's dtype.

    Returns False, without effect, for what the library does not serve: quantized pages, trees and
    other sizes.
    """
    if group.ancestors is not None or not _are_served(q, keys, values):
        return False
    sinks = None if options.sinks is None else options.sinks.float().contiguous()
    layer = _layer(
        None if sinks is None else sinks.data_ptr(),
        *(q.shape[1], keys.num_heads, keys.dim, values.dim, keys.block_size),
        values.data.stride(2),
        *(q.stride(0), q.stride(1)),
        *(options.sliding_window or 0, options.num_sink_positions),
        *(options.scale, options.softcap or 0.0),
    )
    begins = group.block_positions
    parts = (group.rows, group.positions, group.block_tables)
    assert all(part.is_contiguous() for part in parts), "the library reads them row by row"
    task = _Group(
        *(group.rows.data_ptr(), group.positions.data_ptr(), group.block_tables.data_ptr()),
        None if begins is None else begins.data_ptr(),
        *(*group.rows.shape, group.block_tables.shape[1], torch.get_num_threads()),
    )
    attend(
        *(ctypes.addressof(task), ctypes.addressof(layer), q.data_ptr()),
        *(keys.data.data_ptr(), values.data.data_ptr(), out.data_ptr()),
    )
    return True


@lru_cache
def _layer(*fields: float | None) -> _Layer:
    return _Layer(*fields)


def _are_served(q: Tensor, keys: KvPages, values: KvPages) -> bool:
    sizes = (keys.dim, values.dim, keys.block_size)
    return (
        keys.scales is None
        and keys.data.dtype is q.dtype
        and q.stride(2) == 1
        and not any(size % UNIT for size in sizes)
    )
