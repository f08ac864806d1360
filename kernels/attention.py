"""Attention of a flat mixed batch over a paged KV cache, in plain PyTorch.

This is the meaning of the op, the path on every device today and the oracle of faster ones. One
call serves one layer: the batch holds decoding sequences (one query each) first, then prefill
chunks. Padding never reaches a sum through multiplication by zero alone: padded positions point at
the null block, which is all zeros, and blocks are zeroed before they get a new owner.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Adjacent decoding sequences `[start, end)` of similar length, computed as one."""

    start: int
    end: int
    block_tables: Tensor
    """int64 `[end - start, max_blocks]`, padded with the null block."""
    context_lens: Tensor
    """int64 `[end - start]`."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence's adjacent new tokens `[start, end)` of the flat batch."""

    start: int
    end: int
    context_len: int
    """Tokens of the sequence once the chunk is in the cache."""
    block_table: Tensor  # int64 [num_blocks]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the step's keys and values go and what each query sees; shared by all layers."""

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
    softcap: float | None = None
    sinks: Tensor | None = None
    """`[num_heads]`: a logit per head that takes part in the softmax and has no value."""


def write_kv(key_cache: Tensor, value_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store `k, v [num_tokens, num_kv_heads, dim]` in caches `[blocks, block_size, heads, dim]`."""
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slots, k)
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slots, v)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    options: AttentionOptions,
) -> Tensor:
    """Attend `q [num_tokens, num_heads, dim]` to the cache; `[num_tokens, num_heads, value_dim]`.

    The step's own keys and values must have been written. Queries see themselves and what lies
    before them in their own sequence.
    """
    out = q.new_empty(*q.shape[:2], value_cache.shape[-1])
    for group in batch.decodes:
        queries = q[group.start : group.end]
        out[group.start : group.end] = _attend_decodes(
            queries, key_cache, value_cache, group, options
        )
    for chunk in batch.prefills:
        queries = q[chunk.start : chunk.end]
        out[chunk.start : chunk.end] = _attend_chunk(
            queries, key_cache, value_cache, chunk, options
        )
    return out


def _attend_decodes(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    group: DecodeGroup,
    options: AttentionOptions,
) -> Tensor:
    tables, lens = group.block_tables, group.context_lens
    num_heads, num_kv_heads = q.shape[1], key_cache.shape[2]
    keys = key_cache[tables].flatten(1, 2).transpose(1, 2)  # [B, kv_heads, context, dim]
    values = value_cache[tables].flatten(1, 2).transpose(1, 2)
    # The heads that share a key/value head become its queries: nothing is repeated.
    queries = q.reshape(-1, num_kv_heads, num_heads // num_kv_heads, q.shape[-1])
    positions = torch.arange(keys.shape[2], device=q.device)
    visible = positions < lens[:, None]
    if options.sliding_window:
        visible &= positions >= lens[:, None] - options.sliding_window
    sinks = options.sinks.view(num_kv_heads, -1, 1) if options.sinks is not None else None
    out = _softmax_attention(queries, keys, values, visible[:, None, None, :], options, sinks)
    return out.reshape(len(q), num_heads, -1)


def _attend_chunk(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    chunk: PrefillChunk,
    options: AttentionOptions,
) -> Tensor:
    num_heads, num_kv_heads = q.shape[1], key_cache.shape[2]
    group = num_heads // num_kv_heads
    keys = key_cache[chunk.block_table].flatten(0, 1)[: chunk.context_len].transpose(0, 1)
    values = value_cache[chunk.block_table].flatten(0, 1)[: chunk.context_len].transpose(0, 1)
    key_positions = torch.arange(chunk.context_len, device=q.device)
    query_positions = key_positions[chunk.context_len - len(q) :, None]
    visible = key_positions <= query_positions
    if options.sliding_window:
        visible &= key_positions > query_positions - options.sliding_window
    queries = q.transpose(0, 1)  # [heads, chunk, dim]
    if group > 1:
        keys = keys.repeat_interleave(group, dim=0)
        values = values.repeat_interleave(group, dim=0)
    sinks = options.sinks.view(num_heads, 1, 1) if options.sinks is not None else None
    out = _softmax_attention(queries[None], keys[None], values[None], visible, options, sinks)
    return out[0].transpose(0, 1)


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
