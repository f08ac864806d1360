"""Rate buckets of a tenant, user or key: refilled to the current time, and charged."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import RateLimited
from .bucket import Bucket, Reading
from .limits import Limits
from .models import RateKind
from .repository import BucketRow
from .standing import RateStanding, Standing

Costs = Mapping[RateKind, int]
"""The cost per rate."""

_WORDS = {
    RateKind.REQUESTS: "requests",
    RateKind.INPUT_TOKENS: "input tokens",
    RateKind.OUTPUT_TOKENS: "output tokens",
}


class Rates:
    """The buckets of the rates that are limited."""

    def __init__(
        self,
        limits: Limits,
        rows: Mapping[RateKind, BucketRow],
        now: Reading,
        *,
        whose: str = "the ",
    ) -> None:
        """`rows`: the buckets as they were written last. `whose` begins messages of refusals."""
        self._whose = whose
        self._limits = {kind: limit for kind in RateKind if (limit := limits.rate(kind))}
        self._buckets = {
            kind: _bucket(rows.get(kind), limit, now) for kind, limit in self._limits.items()
        }
        self._changed: set[RateKind] = set()

    @property
    def standing(self) -> Standing:
        """The remaining amounts."""
        return {
            kind: RateStanding(self._limits[kind], bucket.remaining, bucket.seconds_until_full)
            for kind, bucket in self._buckets.items()
        }

    def costs(self, *, input_tokens: int, output_tokens: int) -> Costs:
        """The amounts that a request pays in advance: of output at most a full bucket, the rest
        when used."""
        whole_bucket = self._limits.get(RateKind.OUTPUT_TOKENS, 0)
        costs = {
            RateKind.REQUESTS: 1,
            RateKind.INPUT_TOKENS: input_tokens,
            RateKind.OUTPUT_TOKENS: min(output_tokens, whole_bucket),
        }
        return {kind: costs[kind] for kind in self._limits}

    def check(self, costs: Costs) -> None:
        """Raise RateLimited unless every bucket has at least this much."""
        refusing = [kind for kind, cost in costs.items() if not self._buckets[kind].passes(cost)]
        if not refusing:
            return
        kind = max(refusing, key=lambda kind: self._buckets[kind].seconds_until(costs[kind]))
        bucket, seconds = self._buckets[kind], self._buckets[kind].seconds_until(costs[kind])
        raise RateLimited(
            f"{self._whose.capitalize()}limit is {self._limits[kind]} {_WORDS[kind]} per minute: "
            f"{bucket.remaining} are left, and this takes {costs[kind]}. There is room in "
            f"{seconds:.3f} s.",
            standing=self.standing,
            retry_after_seconds=seconds,
        )

    def pay(self, costs: Costs) -> None:
        """Take this from the existing buckets; a negative cost refunds."""
        for kind in costs.keys() & self._buckets.keys():
            self._buckets[kind] = self._buckets[kind].paid(costs[kind])
            self._changed.add(kind)

    @property
    def changes(self) -> Mapping[RateKind, BucketRow]:
        """The buckets that were charged, as they are to be written."""
        kinds = sorted(self._changed)
        return {
            kind: BucketRow(self._buckets[kind].level, *self._buckets[kind].at) for kind in kinds
        }


def _bucket(row: BucketRow | None, limit: int, now: Reading) -> Bucket:
    if row is None:
        return Bucket.full(limit, now)
    return Bucket(limit, row.level, Reading(row.clock, row.updated_at)).refilled(now)
