"""The Prometheus metrics. Labels are bounded: routes, statuses, codes, tiers, replicas and a few
tenants, never adapters but for routers (`vllm_metrics`). `docs/metrics.md` is generated from the
texts here and in the collectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...adapters.fetcher_client import FetcherStats
from ...engine.fleet.replica_view import ReplicaView
from ...engine.messages import EngineStats
from .engine_metrics import EngineCollector, RankCollector, UtilizationCollector
from .fleet_metrics import FleetCollector
from .metric_registry import MetricRegistry, OwnMetric
from .request_metrics import (
    BatchMetrics,
    HttpMetrics,
    ObjectiveMetrics,
    SequenceMetrics,
    StartMetrics,
    TuningMetrics,
    UsageMetrics,
    WebhookMetrics,
)
from .speculation_metrics import SpeculationCollector
from .tier_metrics import TierCollector
from .vllm_metrics import AskedAdapters, EngineSizes, VllmCollector, VllmSource


class Metrics:
    """A server's metrics, in a registry of their own."""

    def __init__(
        self,
        stats: Callable[[], EngineStats | None],
        fetcher_stats: Callable[[], FetcherStats] = FetcherStats,
    ) -> None:
        registry = self._registry = MetricRegistry()
        registry.collect(EngineCollector(stats))
        registry.collect(TierCollector(stats, fetcher_stats))
        registry.collect(SpeculationCollector(stats))
        registry.collect(UtilizationCollector(stats))
        registry.collect(RankCollector(stats))
        self.http = HttpMetrics(registry)
        self.sequences = SequenceMetrics(registry)
        self.objective = ObjectiveMetrics(registry)
        self.starts = StartMetrics(registry)
        self.usage = UsageMetrics(registry)
        self.batches = BatchMetrics(registry)
        self.tuning = TuningMetrics(registry)
        self.webhooks = WebhookMetrics(registry)
        self.request_log_dropped = registry.counter(
            "request_log_dropped",
            "Entries missing from the request log because the database was unavailable or too "
            "many requests ended at once.",
        )
        self.samples = registry.counter(
            "samples",
            "Requests that were drawn as samples and answered; `outcome` is `kept`, or `dropped` "
            "where the sample or the tenant's samples are too large, the database was unavailable, "
            "or too many ended at once.",
            ("outcome",),
        )
        self.canary_rollbacks = registry.counter(
            "canary_rollbacks",
            "Canaries that this server ended because they exceeded a limit of their alias.",
            ("limit",),
        )
        self.shadow_requests = registry.counter(
            "shadow_requests",
            "Copies of requests for the shadows of aliases: `compared`, `failed` if the shadow did "
            "not answer, `dropped` if too many waited or a limit was reached.",
            ("outcome",),
        )
        self.canary_comparisons = registry.counter(
            "canary_comparisons",
            "Answers of aliases whose canary is judged: `judged`, `failed` if the other version or "
            "the judge did not answer, `dropped` if too many waited.",
            ("outcome",),
        )
        self._keys_expiring = registry.gauge(
            "keys_expiring",
            "Keys of a `tenant` or `operator` that expire within seven days and have no "
            "successor; updated every five minutes.",
            ("kind",),
        )

    @property
    def own(self) -> Sequence[OwnMetric]:
        """The metrics that are counted here; collectors provide the others."""
        return self._registry.own

    def show_ledger(
        self, *, is_database_away: Callable[[], bool], num_unsettled: Callable[[], int]
    ) -> None:
        """Add the gauges of the database and the ledger. The functions are called at each
        scrape."""
        up = self._registry.gauge(
            "database_up",
            "1 while the database is available; otherwise generation uses cached keys and names.",
        )
        up.set_function(lambda: float(not is_database_away()))
        unsettled = self._registry.gauge(
            "usage_unsettled",
            "Finished requests in the journal that are not yet in the database.",
        )
        unsettled.set_function(lambda: float(num_unsettled()))

    def show_disk(
        self, *, free_bytes: Callable[[], int], held_bytes: Callable[[], int], total_bytes: int
    ) -> None:
        """Add the gauges of the disk. The functions are called at each scrape. `total_bytes`: the
        maximum for uploads."""
        free = self._registry.gauge(
            "disk_free_bytes",
            "Disk of the data folder that uploads and adapters may still use; negative if the "
            "database's reserve is in use.",
        )
        free.set_function(lambda: float(free_bytes()))
        held = self._registry.gauge("uploads_held_bytes", "Declared bytes of unfinished uploads.")
        held.set_function(lambda: float(held_bytes()))
        budget = self._registry.gauge(
            "uploads_budget_bytes", "Limit of the declared bytes of unfinished uploads."
        )
        budget.set(total_bytes)

    def show_fleet(self, views: Callable[[], Sequence[ReplicaView]]) -> None:
        """Add the gauges of the replicas. `views` is called at each scrape."""
        self._registry.collect(FleetCollector(views))

    def show_vllm_names(
        self,
        *,
        model_name: str,
        stats: Callable[[], EngineStats | None],
        sizes: Callable[[], EngineSizes],
        adapters: Callable[[], AskedAdapters],
    ) -> None:
        """Add what routers for vLLM read, under vLLM's names. The functions are called at each
        scrape."""
        source = VllmSource(model_name, stats, sizes, adapters, self._registry.own)
        self._registry.collect(VllmCollector(source))

    def observe_expiring_keys(self, kind: str, number: int) -> None:
        self._keys_expiring.labels(kind).set(number)

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return self._registry.render()
