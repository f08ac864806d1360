"""The Prometheus metrics of a fleet's replicas, as this server sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...engine.fleet.replica_view import ReplicaView
from ...engine.messages import ReplicaState

_GAUGES = {
    "num_running": ("requests_running", "Running requests of all API servers."),
    "num_waiting": ("requests_waiting", "Waiting requests of all API servers."),
    "kv_usage": ("kv_usage_ratio", "Share of used KV blocks."),
    "num_resident": ("adapters", "Adapters on the replica's device."),
}
_SERVING = {ReplicaState.READY, ReplicaState.DRAINING}


class FleetCollector(Collector):
    """Collected at each scrape; empty for a server with an engine of its own.

    A replica that this server cannot reach has only `up`.
    """

    def __init__(self, views: Callable[[], Sequence[ReplicaView]]) -> None:
        self._views = views

    def collect(self) -> Iterator[Metric]:
        views = self._views()
        if not views:
            return
        up = _gauge("up", "1 while this server is connected and the replica serves.")
        for view in views:
            up.add_metric([view.address], float(view.state in _SERVING))
        yield up
        for attribute, (name, text) in _GAUGES.items():
            gauge = _gauge(name, text)
            for view in views:
                if view.failure is None:
                    gauge.add_metric([view.address], getattr(view, attribute))
            yield gauge
        yield from _handovers([view for view in views if view.failure is None])


def _handovers(views: Sequence[ReplicaView]) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        "loraplex_replica_handovers",
        "Prefixes that this server passed on from or to the replica: `complete`, or `given_up` "
        "because they were lost or late.",
        labels=("replica", "outcome"),
    )
    num_bytes = CounterMetricFamily(
        "loraplex_replica_handover_bytes",
        "Bytes of prefixes that this server passed on from or to the replica.",
        labels=("replica",),
    )
    for view in views:
        figures = view.handovers
        ended.add_metric([view.address, "complete"], figures.num_complete)
        ended.add_metric([view.address, "given_up"], figures.num_given_up)
        num_bytes.add_metric([view.address], figures.num_bytes)
    yield ended
    yield num_bytes


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"loraplex_replica_{name}", text, labels=("replica",))
