"""The engine's Prometheus metrics, from its last snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...adapters.manager import Tier
from ...engine.messages import EngineStats

_GAUGES = {
    "num_running": ("requests_running", "Running sequences."),
    "num_waiting": (
        "requests_waiting",
        "Sequences that wait for KV blocks, their adapter or their grammar.",
    ),
    "num_swapped": ("sequences_swapped", "Waiting sequences whose KV is in host memory."),
    "num_free_kv_blocks": ("kv_blocks_free", "Free KV blocks."),
    "host_prefix_bytes": (
        "prefix_cache_host_bytes",
        "Cached prefixes in host memory.",
    ),
    "disk_prefix_bytes": ("prefix_cache_disk_bytes", "Cached prefixes on disk."),
    "disk_prefix_capacity_bytes": (
        "prefix_cache_disk_capacity_bytes",
        "Room for cached prefixes on disk.",
    ),
    "num_disks_off": (
        "prefix_cache_disk_off",
        "1 if the disk failed and holds no prefixes until the engine restarts.",
    ),
    "arena_bytes": ("arena_bytes", "Size of the arena, which holds the adapters on the device."),
    "kv_cache_bytes": ("kv_cache_bytes", "Size of the KV blocks in use and free."),
    "host_cache_bytes": ("host_cache_bytes", "Size of host memory for adapters."),
    "kv_usage": (
        "kv_usage_ratio",
        "Share of used KV blocks, of the fullest pool.",
    ),
}
_COUNTERS = {
    "num_steps": ("engine_steps", "Forward passes."),
    "num_step_sequences": ("engine_step_sequences", "Sequences summed over all steps."),
    "num_graph_steps": (
        "engine_graph_steps",
        "Steps that replayed a captured graph (CUDA).",
    ),
    "num_eager_decodes": (
        "engine_eager_decode_steps",
        "Decode-only steps without a captured graph (CUDA).",
    ),
    "num_prompt_tokens": ("engine_prompt_tokens", "Prompt tokens of started requests."),
    "num_generated_tokens": ("engine_generated_tokens", "Tokens generated."),
    "num_prefix_query_tokens": (
        "prefix_cache_query_tokens",
        "Prompt tokens looked up in the prefix cache.",
    ),
    "num_cached_tokens": ("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache."),
    "num_host_cached_tokens": (
        "prefix_cache_host_hit_tokens",
        "Tokens whose KV was copied back from host memory instead of computed.",
    ),
    "num_blocks_to_host": (
        "prefix_cache_blocks_to_host",
        "KV blocks of evicted prefixes copied to host memory.",
    ),
    "num_blocks_from_host": (
        "prefix_cache_blocks_from_host",
        "KV blocks of prefixes copied back from host memory.",
    ),
    "num_blocks_to_disk": (
        "prefix_cache_blocks_to_disk",
        "KV blocks of prefixes written to the disk.",
    ),
    "num_blocks_from_disk": (
        "prefix_cache_blocks_from_disk",
        "KV blocks of prefixes read from the disk.",
    ),
    "num_blocks_not_to_disk": (
        "prefix_cache_blocks_not_to_disk",
        "KV blocks that left the memory before the disk could write them.",
    ),
    "num_disk_misreads": (
        "prefix_cache_disk_misreads",
        "KV blocks on disk that could not be read as they were written.",
    ),
    "num_disk_waits_given_up": (
        "prefix_cache_disk_waits_given_up",
        "Sequences that computed what the disk did not read in time.",
    ),
    "num_border_moves": (
        "memory_border_moves",
        "Moves of the border between arena and KV cache.",
    ),
    "num_host_border_moves": (
        "host_memory_border_moves",
        "Moves of the border between adapters and KV blocks in host memory.",
    ),
    "num_adapter_loads": ("adapter_loads", "Adapters copied to the device."),
}
_UTILIZATION_GAUGES = {
    "busy": (
        "device_busy_ratio",
        "Share of the time since the last snapshot that steps took; in a fleet the replicas' mean.",
    ),
    "memory": (
        "memory_bandwidth_utilization_ratio",
        "Achieved share of the peak memory bandwidth, by the bytes that steps need.",
    ),
    "compute": (
        "compute_utilization_ratio",
        "Achieved share of peak compute, by the operations that steps need.",
    ),
    "peak_bytes_per_second": (
        "device_peak_bytes_per_second",
        "Memory bandwidth of a copy at engine start, reads and writes.",
    ),
    "peak_flops_per_second": (
        "device_peak_flops_per_second",
        "Speed of a matmul of the served kind (fp32, bf16, int8, int4) at engine start.",
    ),
}
_UTILIZATION_COUNTERS = {
    "step_seconds": ("engine_step_seconds", "Total step time."),
    "num_bytes": ("engine_moved_bytes", "Bytes that steps had to move."),
    "num_flops": ("engine_flops", "Operations that steps had to do."),
}


_RANK_GAUGES = {
    "resident_bytes": ("rank_resident_bytes", "Resident memory of the process of a rank."),
    "weight_bytes": ("rank_weight_bytes", "Weights of the base that a rank holds."),
    "kv_bytes": ("rank_kv_cache_bytes", "Size of the KV cache of a rank."),
    "arena_bytes": ("rank_arena_bytes", "Size of the arena of a rank."),
    "arena_used_bytes": ("rank_arena_used_bytes", "Adapters in the arena of a rank."),
    "host_bytes": ("rank_host_cache_bytes", "Size of the adapters' host memory of a rank."),
    "host_used_bytes": ("rank_host_cache_used_bytes", "Adapters in host memory of a rank."),
    "age_seconds": ("rank_report_age_seconds", "Time since a rank has reported its memory."),
}


class EngineCollector(Collector):
    """Collected at each scrape; empty while the engine is down."""

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
                "Preempted sequences, by `recompute` or `swap`.",
                labels=("kind",),
            ),
            [("recompute", stats.num_preemptions - stats.num_swaps), ("swap", stats.num_swaps)],
        )
        yield _labelled(
            CounterMetricFamily(
                "loraplex_tenant_service_tokens",
                "Prompt and output tokens computed for a tenant, without cached and recomputed "
                "ones.",
                labels=("tenant_id",),
            ),
            stats.tenant_service,
        )
        tiers = Counter(adapter.tier for adapter in stats.adapters)
        yield _labelled(
            GaugeMetricFamily(
                "loraplex_adapters",
                "Adapters known to the engine, by tier.",
                labels=("tier",),
            ),
            [(tier.value, tiers[tier]) for tier in Tier],
        )


class RankCollector(Collector):
    """The memory of each rank of a tensor-parallel group, from the same snapshot."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        ranks = [] if stats is None else stats.ranks
        for attribute, (name, text) in _RANK_GAUGES.items():
            family = GaugeMetricFamily(f"loraplex_{name}", text, labels=("rank",))
            values = ((str(rank.rank), getattr(rank, attribute)) for rank in ranks)
            yield _labelled(family, values)


class UtilizationCollector(Collector):
    """The utilization of the device's peak by the steps, from the same snapshot."""

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
