"""The statistics of several engines as those of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from ...adapters.identity import AdapterKey
from ...adapters.load_times import SecondsHistogram
from ...adapters.status import AdapterStatus, AdapterTierStats
from ...adapters.tier import Tier
from ..messages import EngineStats, ProposerTotals, SpeculationStats, UtilizationStats

_SPEED = {tier: place for place, tier in enumerate(Tier)}

NumberedT = TypeVar("NumberedT", bound=Any)


def sum_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Counters and gauges are added; shares are averaged; `kv_usage` is that of the fullest engine.

    An adapter is in the fastest tier that has it anywhere, with the leases of all engines.
    `stats` has at least one element. The sum has no ranks: those of one engine are not another's.
    """
    return replace(
        _added(stats),
        kv_usage=max(each.kv_usage for each in stats),
        adapters=_sum_adapters(stats),
        gone_adapters=[],
        utilization=_sum_utilization([each.utilization for each in stats]),
        tenant_service=list(_sum_counts(dict(each.tenant_service) for each in stats).items()),
        adapter_tiers=_sum_tiers([each.adapter_tiers for each in stats]),
        speculation=_sum_speculation(stats),
        speculation_totals=_sum_totals(stats),
        ranks=[],
    )


def _added(parts: Sequence[NumberedT]) -> NumberedT:
    """The first part with the sums of all in its numbers."""
    numbers = {
        field.name: sum(getattr(part, field.name) for part in parts)
        for field in fields(parts[0])
        if isinstance(getattr(parts[0], field.name), int | float)
    }
    return replace(parts[0], **numbers)


def _sum_adapters(stats: Sequence[EngineStats]) -> list[AdapterStatus]:
    """In their order within each engine, those of the first engine first."""
    # 100 engines may report 500 adapters each: of most adapters there is one report.
    found: dict[AdapterKey, AdapterStatus] = {}
    for each in stats:
        for status in each.adapters:
            known = found.get(status.key)
            found[status.key] = status if known is None else _sum_statuses(known, status)
    return list(found.values())


def _sum_statuses(first: AdapterStatus, second: AdapterStatus) -> AdapterStatus:
    faster, slower = first, second
    if _SPEED[second.tier] > _SPEED[first.tier]:
        faster, slower = second, first
    device_bytes = faster.device_bytes
    if slower.tier is faster.tier:
        device_bytes += slower.device_bytes
    num_leases = first.num_leases + second.num_leases
    return AdapterStatus(first.key, faster.tier, device_bytes, num_leases)


def _sum_utilization(parts: Sequence[UtilizationStats]) -> UtilizationStats:
    summed = _added(parts)
    return replace(
        summed,
        memory=summed.memory / len(parts),
        compute=summed.compute / len(parts),
        busy=summed.busy / len(parts),
    )


def _sum_tiers(parts: Sequence[AdapterTierStats]) -> AdapterTierStats:
    stages = {stage for part in parts for stage in part.load_seconds}
    return replace(
        _added(parts),
        largest_free_bytes=max(part.largest_free_bytes for part in parts),
        bytes_by_tier=_sum_counts(part.bytes_by_tier for part in parts),
        evictions=_sum_counts(part.evictions for part in parts),
        load_seconds={
            stage: _sum_histograms(
                [part.load_seconds[stage] for part in parts if stage in part.load_seconds]
            )
            for stage in sorted(stages)
        },
    )


def _sum_histograms(parts: Sequence[SecondsHistogram]) -> SecondsHistogram:
    counts = [sum(bucket) for bucket in zip(*(part.counts for part in parts), strict=True)]
    return SecondsHistogram(parts[0].bounds, counts, sum(part.sum for part in parts))


def _sum_speculation(stats: Sequence[EngineStats]) -> list[SpeculationStats]:
    found: dict[Hashable, SpeculationStats] = {}
    for entry in (entry for each in stats for entry in each.speculation):
        known = found.setdefault((entry.key, entry.proposer), entry)
        if known is not entry:
            busier = max(known, entry, key=lambda each: each.num_drafts)
            found[entry.key, entry.proposer] = replace(
                busier,
                num_drafts=known.num_drafts + entry.num_drafts,
                num_draft_tokens=known.num_draft_tokens + entry.num_draft_tokens,
                num_accepted_tokens=known.num_accepted_tokens + entry.num_accepted_tokens,
            )
    return list(found.values())


def _sum_totals(stats: Sequence[EngineStats]) -> list[ProposerTotals]:
    by_proposer: dict[str, list[ProposerTotals]] = {}
    for entry in (entry for each in stats for entry in each.speculation_totals):
        by_proposer.setdefault(entry.proposer, []).append(entry)
    return [_added(entries) for entries in by_proposer.values()]


KeyT = TypeVar("KeyT", bound=Hashable)


def _sum_counts(parts: Iterable[dict[KeyT, int]]) -> dict[KeyT, int]:
    total: Counter[KeyT] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)
