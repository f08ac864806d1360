"""When a sequence's cache is compacted, and to how many tokens. Torch-free.

It depends on numbers of tokens alone: a step knows it when it is scheduled, and a sequence that is
computed again is compacted where it was before.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ..kv_policy import SNAPKV_WINDOW, EvictionMethod, KvPolicy
from .groups import LayerKvShape
from .layout import KvGroup, num_blocks_for

NEVER = sys.maxsize
"""A number of tokens that no sequence has."""


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """The compactions of one sequence. Each leaves `budget` tokens per layer and KV head."""

    method: EvictionMethod
    budget: int
    num_prompt_tokens: int
    block_size: int

    @property
    def first(self) -> int:
        """The number of computed tokens at which the cache is compacted first."""
        if self.num_prompt_tokens > self.budget:
            return self.num_prompt_tokens
        return self.budget + self.block_size

    def next_after(self, num_computed: int) -> int:
        """The number of computed tokens at which the cache is compacted next, if `num_computed` are
        computed now; NEVER if it no longer is."""
        if num_computed < self.first:
            return self.first
        if self.method is EvictionMethod.SNAPKV:
            return NEVER
        num_since = num_computed - self.first
        return num_computed + self.block_size - num_since % self.block_size

    @property
    def first_observed(self) -> int:
        """The first position whose attention counts."""
        return self.num_prompt_tokens - SNAPKV_WINDOW if self._is_once else 0

    @property
    def end_observed(self) -> int:
        """The position after the last one whose attention counts."""
        return self.num_prompt_tokens if self._is_once else NEVER

    @property
    def num_recent(self) -> int:
        """The last tokens, which are kept whatever attention they received."""
        return SNAPKV_WINDOW if self._is_once else self.budget // 2

    @property
    def num_reusable_tokens(self) -> int:
        """The first tokens of the prompt, whose attention does not count: they may come from the
        prefix cache."""
        return self.first_observed

    @property
    def num_target_blocks(self) -> int:
        """Blocks that a compaction moves the kept tokens to."""
        return num_blocks_for(self.budget, self.block_size)

    def num_blocks(self, num_evicted: int, num_computed: int, num_tokens: int) -> int:
        """The maximum number of blocks that the sequence holds while `num_tokens` more than
        `num_computed` are computed, of which `num_evicted` have left the cache."""
        end, point = num_computed + num_tokens, self.next_after(num_computed)
        if end < point:
            return num_blocks_for(end - num_evicted, self.block_size)
        peak = num_blocks_for(point - num_evicted, self.block_size) + self.num_target_blocks
        if end < self.next_after(point):
            return max(peak, num_blocks_for(self.budget + end - point, self.block_size))
        num_later = num_blocks_for(self.budget + self.block_size, self.block_size)
        return max(peak, num_later + self.num_target_blocks)

    @property
    def _is_once(self) -> bool:
        return self.method is EvictionMethod.SNAPKV


def plan_eviction(
    policy: KvPolicy | None, *, num_prompt_tokens: int, max_num_tokens: int, block_size: int
) -> EvictionPlan | None:
    """The plan for a sequence of at most `max_num_tokens`; None if it keeps all of its tokens."""
    if policy is None or max_num_tokens == num_prompt_tokens:
        return None
    plan = EvictionPlan(policy.method, policy.budget, num_prompt_tokens, block_size)
    if policy.method is EvictionMethod.SNAPKV and num_prompt_tokens <= policy.budget:
        return None
    return plan if plan.first < max_num_tokens else None


def eviction_obstacle(
    groups: Sequence[KvGroup], shapes: Sequence[LayerKvShape], *, quantizes_blocks: bool
) -> str | None:
    """Why the cache of these layers cannot evict tokens by attention; None if it can."""
    if any(group.holds_states for group in groups):
        return "not supported for layers with states, which keep no tokens that could be evicted"
    if any(group.window is not None for group in groups):
        return "not supported with attention windows: a window is made of adjacent positions"
    if any(shape.is_latent for shape in shapes):
        return "not supported for multi-head latent attention: its heads share one latent per token"
    if any(shape.has_slopes for shape in shapes):
        return "not supported with ALiBi: a key's logit depends on how far it is from the query"
    if quantizes_blocks:
        return "not supported with --kv-dtype int4 and int2: tokens are quantized by block"
    return None
