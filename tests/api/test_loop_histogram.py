from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from loraplex.api.telemetry.loop_histogram import LoopHistogram

BOUNDS = (0.001, 0.5, 1.0, 10.0)


def rendered(metric: LoopHistogram | Histogram) -> list[str]:
    registry = CollectorRegistry()
    registry.register(metric)
    return [
        line for line in generate_latest(registry).decode().splitlines() if "_created" not in line
    ]


@given(st.lists(st.sampled_from((*BOUNDS, 0.0, 0.0005, 0.7, 9.99, 11.0, 1e9)), max_size=30))
def test_it_reads_as_prometheus_own_histogram_does(amounts: list[float]) -> None:
    own = Histogram("seconds", "How long.", buckets=BOUNDS, registry=None)
    ours = LoopHistogram("seconds", "How long.", BOUNDS)
    for amount in amounts:
        own.observe(amount)
        ours.observe(amount)
    assert rendered(ours) == rendered(own)
