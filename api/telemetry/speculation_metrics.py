"""Prometheus metrics of speculation by proposer. Adapters are counted, never named."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from statistics import fmean

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...engine.messages import EngineStats, SpeculationStats

_COUNTERS = {
    "num_drafts": ("speculation_drafts", "Verified drafts: a request's draft tokens of one step."),
    "num_draft_tokens": ("speculation_draft_tokens", "Verified draft tokens."),
    "num_accepted_tokens": ("speculation_accepted_tokens", "Accepted draft tokens."),
    "seconds": ("speculation_proposing_seconds", "Time spent on proposing draft tokens."),
}


class SpeculationCollector(Collector):
    """Collected at each scrape; empty while the engine is down."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        for attribute, (name, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"loraplex_{name}", text, labels=("proposer",))
            for totals in stats.speculation_totals:
                counter.add_metric([totals.proposer], getattr(totals, attribute))
            yield counter
        yield from _of_adapters(stats.speculation)


def _of_adapters(entries: Iterable[SpeculationStats]) -> Iterator[Metric]:
    by_proposer: dict[str, list[SpeculationStats]] = defaultdict(list)
    for entry in entries:
        by_proposer[entry.proposer].append(entry)
    acceptance = GaugeMetricFamily(
        "loraplex_speculation_acceptance_ratio",
        "Recent acceptance rate of the first draft token, averaged over recently used adapter "
        "versions.",
        labels=("proposer",),
    )
    adapters = GaugeMetricFamily(
        "loraplex_speculation_adapters",
        "Recently used adapter versions and the base, by whether speculation is `on` or `off` "
        "for them.",
        labels=("proposer", "state"),
    )
    for proposer, own in by_proposer.items():
        acceptance.add_metric([proposer], fmean(entry.acceptance for entry in own))
        num_on = sum(entry.num_tokens > 0 for entry in own)
        adapters.add_metric([proposer, "on"], num_on)
        adapters.add_metric([proposer, "off"], len(own) - num_on)
    yield acceptance
    yield adapters
