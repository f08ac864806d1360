"""Histograms of milliseconds that can be added up: over steps, servers and restarts.

Bucket bounds grow by a fourth of a doubling, so a percentile is off by a tenth at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

FIRST_BOUND_MS = 0.1
BUCKETS_PER_DOUBLING = 4
NUM_BUCKETS = 96
"""The last begins at 24 minutes."""


def bucket_of(milliseconds: float) -> int:
    """The bucket that counts this."""
    if milliseconds <= FIRST_BOUND_MS:
        return 0
    bucket = math.ceil(math.log2(milliseconds / FIRST_BOUND_MS) * BUCKETS_PER_DOUBLING)
    return min(bucket, NUM_BUCKETS - 1)


def percentile(counts: Mapping[str, int], fraction: float) -> float | None:
    """The milliseconds that this part of what was counted stayed below; None if nothing was.

    `counts` by the bucket's number as text. Within a bucket the logarithm is taken as even.
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
