"""Histograms of milliseconds that can be added over time steps, servers and restarts.

Bucket bounds grow by a fourth of a doubling, so a percentile has an error of a tenth at most.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping

FIRST_BOUND_MS = 0.1
BUCKETS_PER_DOUBLING = 4
NUM_BUCKETS = 96
"""The last begins at 24 minutes."""


def bucket_of(milliseconds: float) -> str:
    """The bucket that counts this: its number as text."""
    return _NAMES[bisect_left(_BOUNDS, milliseconds)]


def percentile(counts: Mapping[str, int], fraction: float) -> float | None:
    """The percentile in milliseconds; None without counts.

    `counts` by `bucket_of`. Values are assumed to be log-uniform within a bucket.
    """
    total = sum(counts.values())
    if not total:
        return None
    rank = fraction * total
    for bucket, count in sorted((int(bucket), count) for bucket, count in counts.items()):
        if rank <= count:
            return _bound(bucket - 1 + rank / count)
        rank -= count
    return _bound(NUM_BUCKETS - 1)


def _bound(bucket: float) -> float:
    return FIRST_BOUND_MS * math.exp2(max(bucket, 0.0) / BUCKETS_PER_DOUBLING)


_BOUNDS = [_bound(bucket) for bucket in range(NUM_BUCKETS - 1)]
_NAMES = [str(bucket) for bucket in range(NUM_BUCKETS)]
