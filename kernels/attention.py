"""Attention of a flat mixed batch over a paged KV cache, in plain PyTorch.

This is the meaning of the op, the path on every device today and the oracle of faster ones. One
call serves one layer: the batch holds decoding sequences (one query each) first, then prefill
chunks. Padding never reaches a sum through multiplication by zero alone: padded positions point at
the null block, which is all zeros, and blocks are zeroed before they get a new owner.

Layers with a window read only the blocks that a query can see: their block tables skip what lies
behind the window, and say at which position each block begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .kv_pages import KvPages


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Adjacent decoding sequences `[start, end)` of similar length, computed as one."""

    start: int
    end: int
    block_tables: Tensor
    """int64 `[end - start, max_blocks]`, padded with the null block."""
    context_lens: Tensor
    """int64 `[end - start]`."""
    block_positions: Tensor | None = None
    """int64 like `block_tables`: the position of each block's first token. None: the tables begin
    at position 0 and skip nothing."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence's adjacent new tokens `[start, end)` of the flat batch."""

    start: int
    end: int
    context_len: int
    """Tokens of the sequence once the chunk is in the cache."""
    block_table: Tensor  # int64 [num_blocks]
    block_positions: Tensor | None = None
    """As in a DecodeGroup."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the step's keys and values go and what each query reads; shared by the layers whose
    keys and values lie in the same blocks."""

    slot_mapping: Tensor
    """int64 `[num_tokens]`: block id × block size + offset."""
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillChunk, ...]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer's attention adds to plain softmax attention."""

    scale: float
    sliding_window: int | None = None
    """A query sees this many positions, its own included."""
    num_sink_positions: int = 0
    """First positions of the sequence that a query sees although they lie behind its window."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """`[num_heads]`: a logit per head that takes part in the softmax and has no value."""


def paged_attention(
    q: Tensor, keys: KvPages, values: KvPages, batch: AttentionBatch, options: AttentionOptions
) -> Tensor:
    """Attend `q [num_tokens, num_heads, dim]` to the cache; `[num_tokens, num_heads, value_dim]`.

    The step's own keys and values must have been written. Queries see themselves and what lies
    before them in their own sequence.
    """
    out = q.new_empty(*q.shape[:2], values.dim)
    for group in batch.decodes:
        queries = q[group.start : group.end]
        out[group.start : group.end] = _attend_decodes(queries, keys, values, group, options)
    for chunk in batch.prefills:
        queries = q[chunk.start : chunk.end]
        out[chunk.start : chunk.end] = _attend_chunk(queries, keys, values, chunk, options)
    return out


def _attend_decodes(
    q: Tensor,
    key_pages: KvPages,
    value_pages: KvPages,
    group: DecodeGroup,
    options: AttentionOptions,
) -> Tensor:
    num_heads, num_kv_heads = q.shape[1], key_pages.num_heads
    # [B, kv_heads, context, dim]
    keys = key_pages.gather(group.block_tables).flatten(1, 2).transpose(1, 2)
    values = value_pages.gather(group.block_tables).flatten(1, 2).transpose(1, 2)
    # The heads that share a key/value head become its queries: nothing is repeated.
    queries = q.reshape(-1, num_kv_heads, num_heads // num_kv_heads, q.shape[-1])
    positions = _key_positions(group.block_positions, keys.shape[2], key_pages.block_size, q.device)
    visible = _visible(positions, group.context_lens[:, None] - 1, options)
    sinks = options.sinks.view(num_kv_heads, -1, 1) if options.sinks is not None else None
    out = _softmax_attention(queries, keys, values, visible[:, None, None, :], options, sinks)
    return out.reshape(len(q), num_heads, -1)


def _attend_chunk(
    q: Tensor,
    key_pages: KvPages,
    value_pages: KvPages,
    chunk: PrefillChunk,
    options: AttentionOptions,
) -> Tensor:
    num_heads, num_kv_heads = q.shape[1], key_pages.num_heads
    group = num_heads // num_kv_heads
    keys = key_pages.gather(chunk.block_table).flatten(0, 1)
    values = value_pages.gather(chunk.block_table).flatten(0, 1)
    if chunk.block_positions is None:
        keys, values = keys[: chunk.context_len], values[: chunk.context_len]
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    positions = _key_positions(chunk.block_positions, keys.shape[1], key_pages.block_size, q.device)
    first = chunk.context_len - len(q)
    query_positions = torch.arange(first, chunk.context_len, device=q.device)[:, None]
    visible = _visible(positions, query_positions, options)
    queries = q.transpose(0, 1)  # [heads, chunk, dim]
    if group > 1:
        keys = keys.repeat_interleave(group, dim=0)
        values = values.repeat_interleave(group, dim=0)
    sinks = options.sinks.view(num_heads, 1, 1) if options.sinks is not None else None
    out = _softmax_attention(queries[None], keys[None], values[None], visible, options, sinks)
    return out[0].transpose(0, 1)


def _key_positions(
    block_positions: Tensor | None, num_keys: int, block_size: int, device: torch.device
) -> Tensor:
    """The position of each gathered key in its sequence."""
    if block_positions is None:
        return torch.arange(num_keys, device=device)
    offsets = torch.arange(block_size, device=device)
    return (block_positions[..., None] + offsets).flatten(-2)


def _visible(keys: Tensor, queries: Tensor, options: AttentionOptions) -> Tensor:
    """Which key positions which query positions see; the two broadcast."""
    visible = keys <= queries
    if options.sliding_window:
        near = keys > queries - options.sliding_window
        visible &= near | (keys < options.num_sink_positions)
    return visible


def _softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    options: AttentionOptions,
    sinks: Tensor | None,
) -> Tensor:
    """`q [B, H, Q, D]`, `k, v [B, H, K, D]`, `visible` broadcasts to `[B, H, Q, K]`."""
    if options.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, visible, scale=options.scale)
    scores = (q @ k.transpose(-1, -2)).float() * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        return scores.softmax(-1).to(v.dtype) @ v
    sinks = sinks.float().expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return weights.to(v.dtype) @ v
