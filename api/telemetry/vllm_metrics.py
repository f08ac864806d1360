"""The metrics under the names of vLLM, for routers that scrape vLLM (`--vllm-metrics`).

The values are those of our own metrics. Only one metric has no counterpart: the adapters of open
requests, as labels, which routers need to send a request to where its adapter is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ...engine.messages import EngineStats
from .metric_registry import OwnMetric

_GAUGES = {
    "num_running": ("num_requests_running",),
    "num_waiting": ("num_requests_waiting",),
    "kv_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
}
"""The second name is the one before version 0.10."""
_COUNTERS = {
    "num_preemptions": ("num_preemptions",),
    "num_prompt_tokens": ("prompt_tokens",),
    "num_generated_tokens": ("generation_tokens",),
    "num_prefix_query_tokens": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
    "num_cached_tokens": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
}
_OWN = {
    "loraplex_time_to_first_token_seconds": "time_to_first_token_seconds",
    "loraplex_inter_token_latency_seconds": "inter_token_latency_seconds",
    "loraplex_time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "loraplex_end_to_end_seconds": "e2e_request_latency_seconds",
    "loraplex_queue_seconds": "request_queue_time_seconds",
    "loraplex_request_prompt_tokens": "request_prompt_tokens",
    "loraplex_request_completion_tokens": "request_generation_tokens",
}
"""Histograms; the bounds of their buckets are ours."""


class AskedAdapters(NamedTuple):
    """Adapters of open requests, by the names in their `model` fields."""

    running: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    """Of requests that no step has had yet."""


class EngineSizes(NamedTuple):
    """What does not change while the engine runs."""

    kv_block_size: int = 0
    """In tokens."""
    num_kv_blocks: int = 0
    max_num_seqs: int = 0
    """Maximum sequences of a step."""


class VllmSource(NamedTuple):
    """What the metrics are read from at each scrape."""

    model_name: str
    """The base's."""
    stats: Callable[[], EngineStats | None]
    sizes: Callable[[], EngineSizes]
    """Called only if there are stats."""
    adapters: Callable[[], AskedAdapters]
    own: Iterable[OwnMetric]


class VllmCollector(Collector):
    """Those of the engine are absent while it is down."""

    def __init__(self, source: VllmSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        yield from self._renamed()
        stats = self._source.stats()
        if stats is None:
            return
        yield from self._figures(GaugeMetricFamily, _GAUGES, stats)
        yield from self._figures(CounterMetricFamily, _COUNTERS, stats)
        sizes = self._source.sizes()
        yield _info_metric(
            "cache_config_info",
            "The KV cache; the value is always 1.",
            {"block_size": str(sizes.kv_block_size), "num_gpu_blocks": str(sizes.num_kv_blocks)},
            1.0,
        )
        asked = self._source.adapters()
        yield _info_metric(
            "lora_requests_info",
            "The adapters of open requests. `max_lora` is the maximum number of sequences of a "
            "step: each may have its own adapter. The value is the time.",
            {
                "max_lora": str(sizes.max_num_seqs),
                "running_lora_adapters": ",".join(sorted(asked.running)),
                "waiting_lora_adapters": ",".join(sorted(asked.waiting)),
            },
            time.time(),
        )

    def _figures(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        names: Mapping[str, tuple[str, ...]],
        stats: EngineStats,
    ) -> Iterator[Metric]:
        for attribute, theirs in names.items():
            for name in theirs:
                text = f"As `{attribute}` of the engine's snapshot."
                family = kind(f"vllm:{name}", text, labels=("model_name",))
                family.add_metric([self._source.model_name], getattr(stats, attribute))
                yield family

    def _renamed(self) -> Iterator[Metric]:
        for metric in self._source.own:
            for ours in metric.collect():
                if ours.name in _OWN:
                    yield self._renamed_histogram(ours)

    def _renamed_histogram(self, ours: Metric) -> Metric:
        name = f"vllm:{_OWN[ours.name]}"
        theirs = HistogramMetricFamily(name, f"As `{ours.name}`.", labels=("model_name",))
        for sample in ours.samples:
            suffix = sample.name.removeprefix(ours.name)
            if suffix != "_created":
                labels = {"model_name": self._source.model_name, **sample.labels}
                theirs.add_sample(name + suffix, labels, sample.value)
        return theirs


def _info_metric(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(f"vllm:{name}", text, labels=tuple(labels))
    family.add_metric(list(labels.values()), value)
    return family
