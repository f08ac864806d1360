"""How well tokens are guessed, by proposer, for Prometheus. Adapters are counted, never named."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from statistics import fmean

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...engine.messages import EngineStats, SpeculationStats

_COUNTERS = {
    "num_drafts": ("speculation_drafts", "Drafts verified: a request's guesses of one step."),
    "num_draft_tokens": ("speculation_draft_tokens", "Tokens guessed and verified."),
    "num_accepted_tokens": ("speculation_accepted_tokens", "Guesses that were right."),
    "seconds": ("speculation_proposing_seconds", "Time spent on guessing."),
}


class SpeculationCollector(Collector):
    """Read when Prometheus asks; nothing while the engine is down."""

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
        "How often the first token of a draft was right lately, mean over the adapter versions "
        "used lately.",
        labels=("proposer",),
    )
    adapters = GaugeMetricFamily(
        "loraplex_speculation_adapters",
        "Adapter versions used lately, and the base, by whether guessing for them pays now: `on`, "
        "`off`.",
        labels=("proposer", "state"),
    )
    for proposer, own in by_proposer.items():
        acceptance.add_metric([proposer], fmean(entry.acceptance for entry in own))
        num_on = sum(entry.num_tokens > 0 for entry in own)
        adapters.add_metric([proposer, "on"], num_on)
        adapters.add_metric([proposer, "off"], len(own) - num_on)
    yield acceptance
    yield adapters
