"""The engine's own figures for Prometheus, from its last snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...adapters.residency import Tier
from ...engine.messages import EngineStats

_GAUGES = {
    "num_running": ("requests_running", "Sequences in the batch."),
    "num_waiting": (
        "requests_waiting",
        "Sequences that wait for room, for their adapter or for their grammar.",
    ),
    "num_swapped": ("sequences_swapped", "Waiting sequences whose KV is in host memory."),
    "num_free_kv_blocks": ("kv_blocks_free", "KV blocks that no request holds."),
    "kv_usage": (
        "kv_usage_ratio",
        "Part of the KV blocks that requests hold, of the fullest pool.",
    ),
}
_COUNTERS = {
    "num_steps": ("engine_steps", "Forward passes."),
    "num_step_sequences": ("engine_step_sequences", "Sequences of all steps together."),
    "num_graph_steps": (
        "engine_graph_steps",
        "Of these steps those that replayed a captured graph (CUDA).",
    ),
    "num_eager_decodes": (
        "engine_eager_decode_steps",
        "Steps of decodes alone that no captured graph served (CUDA).",
    ),
    "num_prompt_tokens": ("engine_prompt_tokens", "Prompt tokens of started requests."),
    "num_generated_tokens": ("engine_generated_tokens", "Tokens generated."),
    "num_prefix_query_tokens": (
        "prefix_cache_query_tokens",
        "Prompt tokens looked up in the prefix cache.",
    ),
    "num_cached_tokens": ("prefix_cache_hit_tokens", "Prompt tokens found there."),
    "num_adapter_loads": ("adapter_loads", "Adapters copied to the device."),
}
_UTILIZATION_GAUGES = {
    "memory": (
        "memory_bandwidth_utilization_ratio",
        "Bytes that the steps had to move, over the peak.",
    ),
    "compute": ("compute_utilization_ratio", "Operations that the steps had to do, over the peak."),
    "peak_bytes_per_second": (
        "device_peak_bytes_per_second",
        "What a copy reached when the engine started, reads and writes.",
    ),
    "peak_flops_per_second": (
        "device_peak_flops_per_second",
        "What a matmul of the served kind (fp32, bf16, int8, int4) reached then.",
    ),
}
_UTILIZATION_COUNTERS = {
    "step_seconds": ("engine_step_seconds", "Time in which steps ran."),
    "num_bytes": ("engine_moved_bytes", "Bytes that the steps had to move."),
    "num_flops": ("engine_flops", "Operations that the steps had to do."),
}


class EngineCollector(Collector):
    """Read when Prometheus asks; nothing while the engine is down."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        yield from _families(GaugeMetricFamily, _GAUGES, stats)
        yield from _families(CounterMetricFamily, _COUNTERS, stats)
        yield _labelled(
            CounterMetricFamily(
                "loraplex_preemptions",
                "Sequences put back, to `recompute` or to `swap` in.",
                labels=("kind",),
            ),
            [("recompute", stats.num_preemptions - stats.num_swaps), ("swap", stats.num_swaps)],
        )
        yield _labelled(
            CounterMetricFamily(
                "loraplex_tenant_service_tokens",
                "Tokens computed for a tenant, prompt and output; cached ones and what is computed "
                "again do not count.",
                labels=("tenant_id",),
            ),
            stats.tenant_service,
        )
        tiers = Counter(adapter.tier for adapter in stats.adapters)
        yield _labelled(
            GaugeMetricFamily(
                "loraplex_adapters",
                "Adapters that the engine knows, by where they are.",
                labels=("tier",),
            ),
            [(tier.value, tiers[tier]) for tier in Tier],
        )


class UtilizationCollector(Collector):
    """Beside it: how much of the device's peak the steps used."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        yield from _families(GaugeMetricFamily, _UTILIZATION_GAUGES, stats.utilization)
        yield from _families(CounterMetricFamily, _UTILIZATION_COUNTERS, stats.utilization)


def _families(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    described: dict[str, tuple[str, str]],
    source: object,
) -> Iterator[Metric]:
    for attribute, (name, text) in described.items():
        yield kind(f"loraplex_{name}", text, getattr(source, attribute))


def _labelled(
    family: GaugeMetricFamily | CounterMetricFamily, values: Iterable[tuple[str, float]]
) -> Metric:
    for label, value in values:
        family.add_metric([label], value)
    return family
