"""What Prometheus sees. Labels are bounded: routes, statuses, codes, tiers, a few tenants; never
adapters. `docs/metrics.md` is printed from the texts given here and in the collectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from ...adapters.fetcher_client import FetcherStats
from ...engine.messages import EngineStats, RequestStarted
from ...engine.scheduling.tenant_service import TenantLabels
from .engine_metrics import EngineCollector, UtilizationCollector
from .loop_histogram import LoopHistogram
from .speculation_metrics import SpeculationCollector
from .tier_metrics import TierCollector

# From a GPU that answers at once to a CPU with a long prompt.
_LATENCY_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


Own = TypeVar("Own", bound=MetricWrapperBase | LoopHistogram)


class Metrics:
    """The server's counters, in a registry of their own."""

    def __init__(
        self,
        stats: Callable[[], EngineStats | None],
        fetcher_stats: Callable[[], FetcherStats] = FetcherStats,
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(stats))
        self._registry.register(TierCollector(stats, fetcher_stats))
        self._registry.register(SpeculationCollector(stats))
        self._registry.register(UtilizationCollector(stats))
        self.own: list[MetricWrapperBase | LoopHistogram] = []
        """What is counted here; the collectors have the rest."""
        self._tenants = TenantLabels()
        self._requests = self._counter(
            "http_requests",
            "HTTP requests; `code` is the error code.",
            ("method", "route", "status", "code"),
        )
        self._request_seconds = self._histogram(
            "http_request_seconds",
            "Time from arrival to the last byte of the response.",
            _LATENCY_BUCKETS,
            ("route",),
        )
        self.first_token_seconds = self._histogram(
            "time_to_first_token_seconds",
            "TTFT: time from arrival to a sequence's first token.",
            _LATENCY_BUCKETS,
        )
        self.token_gap_seconds = self._add(
            LoopHistogram(
                "loraplex_inter_token_latency_seconds",
                "ITL: time between a sequence's token events; tokens accepted in one step are "
                "one event.",
                _GAP_BUCKETS,
            )
        )
        self.output_token_seconds = self._histogram(
            "time_per_output_token_seconds",
            "TPOT: mean time per token of a sequence after its first.",
            _GAP_BUCKETS,
        )
        self.end_to_end_seconds = self._histogram(
            "end_to_end_seconds", "Time from arrival to the end of a sequence.", _LATENCY_BUCKETS
        )
        self._queue_seconds = self._histogram(
            "queue_seconds",
            "Time from arrival in the engine to the first step, including the adapter wait.",
            _LATENCY_BUCKETS,
        )
        self._adapter_wait_seconds = self._histogram(
            "adapter_wait_seconds",
            "The part of the queue time in which only the adapter was missing.",
            _LATENCY_BUCKETS,
        )
        self._adapter_tier = self._counter(
            "adapter_tier_hits",
            "Requests by the tier in which their adapter was: device, host, disk, store.",
            ("tier",),
        )
        self.sequences = self._counter(
            "sequences",
            "Finished sequences: stop, length, aborted, error.",
            ("finish_reason",),
        )
        self.request_log_dropped = self._counter(
            "request_log_dropped",
            "Entries missing from the request log because the database was unavailable or too "
            "many requests ended at once.",
        )
        self._tokens = self._counter(
            "tokens",
            "Metered tokens, `prompt` and `completion`, by tenant slug.",
            ("tenant", "kind"),
        )
        self._keys_expiring = self._gauge(
            "keys_expiring",
            "Keys of a `tenant` or `operator` that expire within seven days and have no "
            "successor; updated every five minutes.",
            ("kind",),
        )
        self._prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKEN_BUCKETS
        )
        self._completion_tokens = self._histogram(
            "request_completion_tokens", "Output tokens of a request.", _TOKEN_BUCKETS
        )

    def show_ledger(
        self, *, is_database_away: Callable[[], bool], num_unsettled: Callable[[], int]
    ) -> None:
        """Ask these whenever somebody looks."""
        up = self._gauge(
            "database_up",
            "1 while the database is available; otherwise generation uses cached keys and names.",
        )
        up.set_function(lambda: float(not is_database_away()))
        unsettled = self._gauge(
            "usage_unsettled",
            "Finished requests in the journal that are not yet in the database.",
        )
        unsettled.set_function(lambda: float(num_unsettled()))

    def show_disk(
        self, *, free_bytes: Callable[[], int], held_bytes: Callable[[], int], total_bytes: int
    ) -> None:
        """Ask these whenever somebody looks. `total_bytes`: what uploads may hold."""
        free = self._gauge(
            "disk_free_bytes",
            "Disk of the data folder that uploads and adapters may still use; negative if the "
            "database's reserve is in use.",
        )
        free.set_function(lambda: float(free_bytes()))
        held = self._gauge("uploads_held_bytes", "Declared bytes of unfinished uploads.")
        held.set_function(lambda: float(held_bytes()))
        budget = self._gauge(
            "uploads_budget_bytes", "Limit of the declared bytes of unfinished uploads."
        )
        budget.set(total_bytes)

    def observe_request(
        self, *, method: str, route: str, status: int, code: str, seconds: float
    ) -> None:
        self._requests.labels(method, route, str(status), code).inc()
        self._request_seconds.labels(route).observe(seconds)

    def observe_expiring_keys(self, kind: str, number: int) -> None:
        self._keys_expiring.labels(kind).set(number)

    def observe_start(self, started: RequestStarted) -> None:
        self._queue_seconds.observe(started.queue_seconds)
        if started.adapter_tier is not None:
            self._adapter_tier.labels(started.adapter_tier.value).inc()
            self._adapter_wait_seconds.observe(started.adapter_wait_seconds)

    def observe_usage(self, tenant: str, *, prompt_tokens: int, completion_tokens: int) -> None:
        label = self._tenants.label(tenant)
        self._tokens.labels(label, "prompt").inc(prompt_tokens)
        self._tokens.labels(label, "completion").inc(completion_tokens)
        self._prompt_tokens.observe(prompt_tokens)
        self._completion_tokens.observe(completion_tokens)

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return self._add(Counter(f"loraplex_{name}", text, labels, registry=None))

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return self._add(Gauge(f"loraplex_{name}", text, labels, registry=None))

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Histogram:
        return self._add(
            Histogram(f"loraplex_{name}", text, labels, buckets=buckets, registry=None)
        )

    def _add(self, metric: Own) -> Own:
        self.own.append(metric)
        self._registry.register(metric)
        return metric
