"""Schemas of the tiers of the prefix cache, and of the border between KV cache and arena."""

from __future__ import annotations

from dataclasses import dataclass

from ...adapters.tier import Tier
from ...engine.messages import EngineStats
from ..contract.answer_model import AnswerModel


@dataclass(frozen=True, slots=True)
class PrefixTierView(AnswerModel):
    """The cached prefixes in one tier. Counters begin with the engine."""

    tier: str
    """`device`, `host` or `disk`."""
    used_bytes: int
    capacity_bytes: int
    """The room that prefixes share with what else is in the tier: the KV cache, or the host memory
    for swapped sequences."""
    hit_tokens: int
    """`device`: prompt tokens found in the prefix cache. `host`: tokens whose KV was copied back,
    also for preempted requests. `disk`: tokens whose KV was read in time."""
    copied_in_bytes: int
    """Copied into the tier; 0 for `device`."""
    copied_out_bytes: int
    """Copied back from the tier; 0 for `device`."""
    evicted_blocks: int
    """KV blocks that were given other content."""

    @classmethod
    def tiers_of(cls, stats: EngineStats | None) -> list[PrefixTierView]:
        """The device, and the host and the disk if the engine keeps prefixes there; empty before
        the engine's first report."""
        if stats is None:
            return []
        device = cls(
            Tier.DEVICE,
            used_bytes=stats.device_prefix_bytes,
            capacity_bytes=stats.kv_cache_bytes,
            hit_tokens=stats.num_cached_tokens,
            copied_in_bytes=0,
            copied_out_bytes=0,
            evicted_blocks=stats.num_device_prefix_evictions,
        )
        host = cls(
            Tier.HOST,
            used_bytes=stats.host_prefix_bytes,
            capacity_bytes=stats.host_prefix_capacity_bytes,
            hit_tokens=stats.num_host_cached_tokens,
            copied_in_bytes=stats.bytes_to_host,
            copied_out_bytes=stats.bytes_from_host,
            evicted_blocks=stats.num_host_prefix_evictions,
        )
        disk = cls(
            Tier.DISK,
            used_bytes=stats.disk_prefix_bytes,
            capacity_bytes=stats.disk_prefix_capacity_bytes,
            hit_tokens=stats.num_disk_cached_tokens,
            copied_in_bytes=stats.bytes_to_disk,
            copied_out_bytes=stats.bytes_from_disk,
            evicted_blocks=stats.num_disk_prefix_evictions,
        )
        return [device, *(tier for tier in (host, disk) if tier.capacity_bytes)]


@dataclass(frozen=True, slots=True)
class BorderView(AnswerModel):
    """The border between KV cache and arena."""

    arena_bytes: int
    kv_cache_bytes: int
    moves: int
    """Since the engine's start; 0 where the border is fixed."""

    @classmethod
    def of(cls, stats: EngineStats) -> BorderView:
        """As the engine last reported."""
        return cls(stats.arena_bytes, stats.kv_cache_bytes, stats.num_border_moves)
