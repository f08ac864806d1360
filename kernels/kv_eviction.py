"""KV eviction by attention: what cached tokens received, which ones stay, and where they go.

Plain PyTorch on any device. Every KV head keeps as many tokens, each its own. Keys are cached with
their rotary embedding, so a token may move to any slot.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import AttentionOptions
from .kv_pages import KvPages

MAX_SCORES = 1 << 24
"""Scores, in fp32, that are computed at a time, unless one query has more."""


def attention_mass(q: Tensor, keys: Tensor, first_place: int, options: AttentionOptions) -> Tensor:
    """The sum of the weights with which queries attend to each key: fp32 `[num_kv_heads,
    num_keys]`, over the query heads of each KV head.

    `q [num_queries, num_heads, dim]`: of adjacent tokens, the first of which sees the `first_place`
    keys before its own. `keys [num_keys, num_kv_heads, dim]`.
    """
    num_keys, num_kv_heads, _ = keys.shape
    num_heads = q.shape[1]
    by_head = keys.float().permute(1, 2, 0)
    sinks = None
    if options.sinks is not None:
        sinks = options.sinks.float().view(num_kv_heads, -1, 1, 1)
    places = torch.arange(num_keys, device=q.device)
    mass = torch.zeros(num_kv_heads, num_keys, device=q.device, dtype=torch.float32)
    num_at_once = max(MAX_SCORES // (num_heads * num_keys), 1)
    for start in range(0, len(q), num_at_once):
        # [kv_heads, heads that share it, queries, dim]
        queries = q[start : start + num_at_once].float().unflatten(1, (num_kv_heads, -1))
        scores = queries.permute(1, 2, 0, 3) @ by_head[:, None] * options.scale
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        last_seen = first_place + start + torch.arange(scores.shape[2], device=q.device)
        scores = scores.masked_fill(places > last_seen[:, None], float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
        mass += scores.softmax(-1)[..., :num_keys].sum((1, 2))
    return mass


def most_attended(mass: Tensor, *, budget: int, num_recent: int, pool_width: int = 1) -> Tensor:
    """The tokens that each head keeps, ascending: int64 `[num_kv_heads, budget]`.

    They are the last `num_recent`, and of the others those with the largest `mass [num_kv_heads,
    num_keys]`; of equal ones the first. `pool_width`, odd: a token counts as much as the largest of
    so many around it.
    """
    num_older = mass.shape[1] - num_recent
    older = mass[:, :num_older]
    if pool_width > 1:
        older = F.max_pool1d(older, pool_width, stride=1, padding=pool_width // 2)
    ranked = older.sort(dim=1, descending=True, stable=True).indices
    chosen = ranked[:, : budget - num_recent].sort(dim=1).values
    recent = torch.arange(num_older, mass.shape[1], device=mass.device)
    return torch.cat([chosen, recent.expand(len(mass), -1)], dim=1)


def move_tokens(pages: KvPages, sources: Tensor, targets: Tensor) -> None:
    """Copy each head's tokens from slots `sources [num_heads, num_tokens]` to slots `targets
    [num_tokens]`, as they are stored. No slot is in both."""
    size = pages.block_size
    heads = torch.arange(len(sources), device=sources.device)
    read = sources.T // size, sources.T % size, heads
    for tensor in pages.tensors:
        tensor[targets // size, targets % size] = tensor[read]
