"""Llama with SnapKV and H2O in plain PyTorch, from their papers: one sequence, no pages, no chunks.

Every KV head has the keys and values of the tokens that it still has, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from loraplex.engine.kv_policy import EvictionMethod, KvPolicy

WINDOW, POOL_WIDTH = 32, 7
BLOCK_SIZE = 16


@dataclass
class HeadCache:
    """What one KV head of one layer has cached."""

    keys: Tensor
    values: Tensor
    received: Tensor
    """The attention that each of its tokens received, from the queries that count."""

    def add(self, keys: Tensor, values: Tensor) -> None:
        self.keys = torch.cat([self.keys, keys])
        self.values = torch.cat([self.values, values])
        self.received = torch.cat([self.received, torch.zeros(len(keys))])

    def keep(self, indices: list[int]) -> None:
        self.keys, self.values = self.keys[indices], self.values[indices]
        self.received = self.received[indices]


@dataclass
class Generated:
    token_ids: list[int]
    logprobs: list[float]
    """Of these tokens."""
    num_cached: list[int]
    """Cached tokens per head when each of these tokens was drawn."""


class EvictingLlama:
    def __init__(self, path: Path, *, has_int8_cache: bool = False) -> None:
        self.model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.has_int8_cache = has_int8_cache

    @torch.no_grad()
    def generate(self, prompt: list[int], max_tokens: int, policy: KvPolicy | None) -> Generated:
        """Greedy tokens."""
        dim = self.model.model.layers[0].self_attn.head_dim
        empty = torch.zeros(0, dim)
        caches = [
            [HeadCache(empty, empty, torch.zeros(0)) for _ in range(self._num_kv_heads)]
            for _ in self.model.model.layers
        ]
        is_h2o = policy is not None and policy.method is EvictionMethod.H2O
        found = Generated([], [], [])
        tokens, start = prompt, 0
        for _ in range(max_tokens):
            num_counted = 0
            if policy is not None:
                num_counted = len(tokens) if is_h2o else WINDOW * (start == 0)
            logits = self._compute(tokens, start, caches, num_counted)
            num_cached = len(caches[0][0].keys)
            if policy is not None and (
                num_cached > policy.budget
                if start == 0
                else is_h2o and num_cached >= policy.budget + BLOCK_SIZE
            ):
                for cache in (cache for layer in caches for cache in layer):
                    cache.keep(_kept(cache, policy))
            start += len(tokens)
            tokens = [int(logits.argmax())]
            found.token_ids += tokens
            found.logprobs.append(float(logits.log_softmax(-1)[tokens[0]]))
            found.num_cached.append(len(caches[0][0].keys))
        return found

    @property
    def _num_kv_heads(self) -> int:
        number: int = self.model.config.num_key_value_heads
        return number

    def _compute(
        self, tokens: list[int], start: int, caches: list[list[HeadCache]], num_counted: int
    ) -> Tensor:
        """The logits after these tokens; the attention of the last `num_counted` counts."""
        decoder = self.model.model
        hidden = decoder.embed_tokens(torch.tensor([tokens]))
        positions = torch.arange(start, start + len(tokens))
        rotary = decoder.rotary_emb(hidden, positions[None])
        for layer, heads in zip(decoder.layers, caches, strict=True):
            hidden = hidden + self._attend(layer, hidden, rotary, heads, num_counted)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        logits: Tensor = self.model.lm_head(decoder.norm(hidden))[0, -1]
        return logits

    def _attend(
        self,
        layer: Any,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        heads: list[HeadCache],
        num_counted: int,
    ) -> Tensor:
        attention, normed = layer.self_attn, layer.input_layernorm(hidden)
        dim, num_new = attention.head_dim, hidden.shape[1]
        q, k, v = (
            projection(normed).view(1, num_new, -1, dim).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        if self.has_int8_cache:
            k, v = _int8(k), _int8(v)
        num_shared = q.shape[1] // len(heads)
        outs = []
        for index, cache in enumerate(heads):
            cache.add(k[0, index], v[0, index])
            num_keys = len(cache.keys)
            is_later = torch.ones(num_new, num_keys).triu(num_keys - num_new + 1).bool()
            queries = q[0, index * num_shared : (index + 1) * num_shared]
            scores = (queries @ cache.keys.T * dim**-0.5).masked_fill(is_later, -torch.inf)
            weights = scores.softmax(-1)
            outs.append(weights @ cache.values)
            cache.received = cache.received + weights[:, num_new - num_counted :].sum((0, 1))
        attended: Tensor = attention.o_proj(torch.cat(outs).transpose(0, 1).reshape(1, num_new, -1))
        return attended


def _kept(cache: HeadCache, policy: KvPolicy) -> list[int]:
    """Which of a head's tokens stay; of equals the first."""
    is_snapkv, total = policy.method is EvictionMethod.SNAPKV, len(cache.keys)
    num_recent = WINDOW if is_snapkv else policy.budget // 2
    older: list[float] = cache.received[: total - num_recent].tolist()
    if is_snapkv:
        reach = POOL_WIDTH // 2
        older = [max(older[max(i - reach, 0) : i + reach + 1]) for i in range(len(older))]
    ranked = sorted(range(len(older)), key=lambda i: (-older[i], i))
    return [*sorted(ranked[: policy.budget - num_recent]), *range(total - num_recent, total)]


def _int8(vectors: Tensor) -> Tensor:
    """As they are after a cache of codes with a bf16 scale each."""
    scales = (vectors.abs().amax(-1, keepdim=True) / 127).bfloat16().float()
    return (vectors / scales).clamp(-127, 127).round() * scales
