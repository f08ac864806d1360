"""A Prometheus histogram without a lock, for events that happen once per token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class LoopHistogram(Collector):
    """Observed by the event loop's thread only: without a lock it costs a fifth of the usual
    histogram.

    It has no labels. A concurrent reader may see a count without its part of the sum.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        """`bounds` in ascending order; a bucket ends with its bound."""
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, amount: float) -> None:
        self._counts[bisect_left(self._bounds, amount)] += 1
        self._sum += amount

    def collect(self) -> Iterator[HistogramMetricFamily]:
        labels = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(labels, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], buckets, self._sum)
        yield family

    def describe(self) -> Iterable[HistogramMetricFamily]:
        return [HistogramMetricFamily(self._name, self._text)]
