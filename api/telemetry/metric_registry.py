"""The registry that a server's metrics are declared in."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from .loop_histogram import LoopHistogram

OwnMetric: TypeAlias = MetricWrapperBase | LoopHistogram
Own = TypeVar("Own", bound=OwnMetric)


class MetricRegistry:
    """The metrics of one server, not of the process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.own: list[OwnMetric] = []
        """The metrics without a collector, in the order of declaration."""

    def collect(self, collector: Collector) -> None:
        """Add a collector that is called at each scrape."""
        self._registry.register(collector)

    def counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return self._add(Counter(f"loraplex_{name}", text, labels, registry=None))

    def gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return self._add(Gauge(f"loraplex_{name}", text, labels, registry=None))

    def histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Histogram:
        return self._add(
            Histogram(f"loraplex_{name}", text, labels, buckets=buckets, registry=None)
        )

    def loop_histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> LoopHistogram:
        return self._add(LoopHistogram(f"loraplex_{name}", text, buckets))

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def _add(self, metric: Own) -> Own:
        self.own.append(metric)
        self._registry.register(metric)
        return metric
