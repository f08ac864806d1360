"""The report on adapters, built from the adapter manager."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ...adapters.identity import AdapterKey
from ...adapters.load_times import BOUNDS
from ...adapters.manager import AdapterManager, Tier
from ..messages import (
    AdapterExplanation,
    AdapterTierStats,
    AdapterTransition,
    ErrorInfo,
    RequestStarted,
    SecondsHistogram,
    SpeculationStats,
)


class HitsByTier:
    """Requests by the tier of their adapter at arrival."""

    def __init__(self) -> None:
        self._hits: Counter[Tier] = Counter()

    def add(self, started: RequestStarted) -> None:
        """A request has begun; those of the base model are not counted."""
        if started.adapter_tier is not None:
            self._hits[started.adapter_tier] += 1

    def snapshot(self) -> dict[Tier, int]:
        return {tier: self._hits[tier] for tier in Tier}


def explain(
    manager: AdapterManager[Any], key: AdapterKey, speculation: list[SpeculationStats]
) -> AdapterExplanation:
    """The answer to ExplainAdapter."""
    found = manager.reports.explain(key)
    now = found.now
    return AdapterExplanation(
        key=key,
        state=found.state,
        tier=found.tier,
        since_seconds=None if found.since is None else now - found.since,
        reason=ErrorInfo(*found.failure) if found.failure else None,
        retry_in_seconds=None if found.retry_at is None else max(0.0, found.retry_at - now),
        order=found.order,
        needed_bytes=found.needed_bytes,
        free_bytes=found.free_bytes,
        largest_free_bytes=found.largest_free_bytes,
        leased_bytes=found.leased_bytes,
        is_pinned=found.is_pinned,
        transitions=[
            AdapterTransition(state, now - at, reason) for state, at, reason in found.transitions
        ],
        speculation=speculation,
    )


def tier_stats(manager: AdapterManager[Any], hits: HitsByTier) -> AdapterTierStats:
    """The part of EngineStats that is about adapters."""
    figures = manager.reports.figures()
    is_full = not figures.free_bytes
    return AdapterTierStats(
        bytes_by_tier={Tier.DEVICE: figures.device_bytes, Tier.HOST: figures.host_bytes},
        num_leases=figures.num_leases,
        leased_bytes=figures.leased_bytes,
        pinned_bytes=figures.pinned_bytes,
        fragmentation=0.0 if is_full else 1 - figures.largest_free_bytes / figures.free_bytes,
        evictions={reason.value: count for reason, count in figures.evictions.items()},
        num_leases_reaped=figures.num_leases_reaped,
        num_moves=figures.num_moves,
        moved_bytes=figures.moved_bytes,
        load_seconds={
            stage: SecondsHistogram(list(BOUNDS), list(histogram.counts), histogram.sum)
            for stage, histogram in figures.load_seconds.items()
        },
        hits=hits.snapshot(),
    )
