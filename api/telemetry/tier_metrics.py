"""Prometheus metrics of adapter tiers, loads and evictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ...adapters.fetcher_client import FetcherStats
from ...adapters.load_times import SecondsHistogram
from ...adapters.manager import Tier
from ...adapters.status import AdapterTierStats
from ...engine.messages import EngineStats

_GAUGES = {
    "num_leases": ("adapter_leases", "Adapter leases held by requests."),
    "leased_bytes": (
        "adapter_leased_bytes",
        "Device bytes of leased adapters, which cannot be evicted.",
    ),
    "pinned_bytes": ("adapter_pinned_bytes", "Device bytes of pinned adapters."),
    "fragmentation": (
        "adapter_arena_fragmentation_ratio",
        "Share of the arena's free bytes outside its largest free block.",
    ),
}
_COUNTERS = {
    "num_leases_reaped": (
        "adapter_leases_reaped",
        "Leases without a request. Each one is a defect: alert on it.",
    ),
    "num_moves": (
        "adapter_moves",
        "Adapters moved by compaction of the arena.",
    ),
    "moved_bytes": ("adapter_moved_bytes", "Bytes moved by compaction of the arena."),
}
_DISK_COUNTERS = {
    "num_hits": ("disk_cache_hits", "Adapter blocks found in the disk cache."),
    "num_misses": ("disk_cache_misses", "Adapter blocks fetched from the store."),
    "num_evictions": ("disk_cache_evictions", "Adapter blocks evicted from the disk cache."),
    "num_corrupt": (
        "disk_cache_corrupt",
        "Corrupt files detected in the disk cache.",
    ),
}


class TierCollector(Collector):
    """Collected at each scrape; without the engine's metrics while it is down."""

    def __init__(
        self, engine: Callable[[], EngineStats | None], fetcher: Callable[[], FetcherStats]
    ) -> None:
        self._engine = engine
        self._fetcher = fetcher

    def collect(self) -> Iterator[Metric]:
        engine, fetcher = self._engine(), self._fetcher()
        held = {Tier.DISK: fetcher.disk.used_bytes}
        if engine is not None:
            held |= engine.adapter_tiers.bytes_by_tier
            yield from _engine_families(engine.adapter_tiers)
        yield _by_label(
            GaugeMetricFamily(
                "loraplex_adapter_tier_bytes",
                "Bytes of adapters on disk, in host memory and on the device.",
                labels=("tier",),
            ),
            {tier.value: num_bytes for tier, num_bytes in held.items()},
        )
        yield CounterMetricFamily(
            "loraplex_fetcher_restarts",
            "Restarts of the fetcher process.",
            fetcher.num_restarts,
        )
        for name, (metric, text) in _DISK_COUNTERS.items():
            yield CounterMetricFamily(f"loraplex_{metric}", text, getattr(fetcher.disk, name))


def _engine_families(tiers: AdapterTierStats) -> Iterator[Metric]:
    for name, (metric, text) in _GAUGES.items():
        yield GaugeMetricFamily(f"loraplex_{metric}", text, getattr(tiers, name))
    for name, (metric, text) in _COUNTERS.items():
        yield CounterMetricFamily(f"loraplex_{metric}", text, getattr(tiers, name))
    yield _by_label(
        CounterMetricFamily(
            "loraplex_adapter_evictions",
            "Adapters that left the device, by reason.",
            labels=("reason",),
        ),
        {reason.value: count for reason, count in tiers.evictions.items()},
    )
    loads = HistogramMetricFamily(
        "loraplex_adapter_load_seconds",
        "Adapter load time by stage: `fetch` (store or disk, to a verified file), `read` (into "
        "host memory), `wait` (for device memory), `copy`.",
        labels=("stage",),
    )
    for stage, histogram in tiers.load_seconds.items():
        loads.add_metric([stage], _buckets(histogram), histogram.sum)
    yield loads


def _buckets(histogram: SecondsHistogram) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, in Prometheus' format."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))


def _by_label(
    family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]
) -> Metric:
    for label, value in values.items():
        family.add_metric([label], value)
    return family
