"""What Prometheus sees. Labels are bounded: routes, statuses, codes and tiers; never adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine.messages import EngineStats, RequestStarted

_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

_ENGINE_GAUGES = {
    "num_running": ("requests_running", "Requests in the batch."),
    "num_waiting": ("requests_waiting", "Requests that wait for room or for their adapter."),
    "num_free_kv_blocks": ("kv_blocks_free", "KV blocks that no request holds."),
    "arena_used_bytes": ("adapter_arena_used_bytes", "Device bytes held by adapters."),
    "host_cache_used_bytes": ("adapter_host_cache_used_bytes", "Host bytes held by adapters."),
}
_ENGINE_COUNTERS = {
    "num_steps": ("engine_steps", "Forward passes."),
    "num_preemptions": ("preemptions", "Requests whose KV blocks were taken back."),
    "num_prompt_tokens": ("engine_prompt_tokens", "Prompt tokens scheduled."),
    "num_cached_tokens": ("engine_cached_tokens", "Prompt tokens found in the prefix cache."),
    "num_generated_tokens": ("engine_generated_tokens", "Tokens generated."),
    "num_adapter_loads": ("adapter_loads", "Adapters copied to the device."),
    "num_adapter_evictions": ("adapter_evictions", "Adapters dropped from the device."),
}


class Metrics:
    """The server's counters, in a registry of their own."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats))
        self.requests = self._counter(
            "http_requests", "Requests answered.", ("method", "route", "status", "code")
        )
        self.request_seconds = self._histogram(
            "http_request_seconds", "From arrival to the last byte.", ("route",), _LATENCY_BUCKETS
        )
        self.first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", (), _LATENCY_BUCKETS
        )
        self.token_gap_seconds = self._histogram(
            "inter_token_latency_seconds", "Gap between token events.", (), _GAP_BUCKETS
        )
        self.adapter_wait_seconds = self._histogram(
            "adapter_wait_seconds",
            "Time in which only the adapter was missing.",
            (),
            _LATENCY_BUCKETS,
        )
        self.adapter_tier = self._counter(
            "adapter_tier_hits", "Where a request found its adapter.", ("tier",)
        )
        self.tokens = self._counter("tokens", "Tokens metered.", ("tenant", "kind"))

    def observe_request(
        self, *, method: str, route: str, status: int, code: str, seconds: float
    ) -> None:
        self.requests.labels(method, route, str(status), code).inc()
        self.request_seconds.labels(route).observe(seconds)

    def observe_start(self, started: RequestStarted) -> None:
        if started.adapter_tier is not None:
            self.adapter_tier.labels(started.adapter_tier.value).inc()
            self.adapter_wait_seconds.observe(started.adapter_wait_seconds)

    def observe_usage(self, tenant: str, *, prompt_tokens: int, completion_tokens: int) -> None:
        self.tokens.labels(tenant, "prompt").inc(prompt_tokens)
        self.tokens.labels(tenant, "completion").inc(completion_tokens)

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"loraplex_{name}", text, labels, registry=self._registry)

    def _histogram(
        self, name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]
    ) -> Histogram:
        return Histogram(f"loraplex_{name}", text, labels, buckets=buckets, registry=self._registry)


class _EngineCollector(Collector):
    """The engine's own figures, read when they are asked for."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        for attribute, (name, text) in _ENGINE_GAUGES.items():
            yield GaugeMetricFamily(f"loraplex_{name}", text, getattr(stats, attribute))
        for attribute, (name, text) in _ENGINE_COUNTERS.items():
            yield CounterMetricFamily(f"loraplex_{name}", text, getattr(stats, attribute))
