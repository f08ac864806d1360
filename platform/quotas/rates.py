"""A tenant's buckets in the database: filled up to now, charged, and written back."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import RateLimited
from ..sessions import TenantSession
from . import repository
from .bucket import Bucket, Reading
from .limits import Limits
from .models import RateBucket, RateKind
from .standing import RateStanding, Standing

Costs = Mapping[RateKind, int]
"""What is to be paid of each rate."""

_WORDS = {
    RateKind.REQUESTS: "requests",
    RateKind.INPUT_TOKENS: "input tokens",
    RateKind.OUTPUT_TOKENS: "output tokens",
}


class Rates:
    """The buckets of the rates that are limited. Writers hold the tenant's quota."""

    def __init__(self, session: TenantSession, limits: Limits, now: Reading) -> None:
        self._session = session
        self._limits = {kind: limit for kind in RateKind if (limit := limits.rate(kind))}
        self._rows = dict(repository.list_buckets(session)) if self._limits else {}
        self._buckets = {
            kind: _bucket(self._rows.get(kind), limit, now) for kind, limit in self._limits.items()
        }

    @property
    def standing(self) -> Standing:
        """What is left."""
        return {
            kind: RateStanding(self._limits[kind], bucket.remaining, bucket.seconds_until_full)
            for kind, bucket in self._buckets.items()
        }

    def costs(self, *, input_tokens: int, output_tokens: int) -> Costs:
        """What a request pays in advance: of output at most a full bucket, the rest when used."""
        whole_bucket = self._limits.get(RateKind.OUTPUT_TOKENS, 0)
        costs = {
            RateKind.REQUESTS: 1,
            RateKind.INPUT_TOKENS: input_tokens,
            RateKind.OUTPUT_TOKENS: min(output_tokens, whole_bucket),
        }
        return {kind: costs[kind] for kind in self._limits}

    def check(self, costs: Costs) -> None:
        """Raise RateLimited unless every bucket lets this pass."""
        refusing = [kind for kind, cost in costs.items() if not self._buckets[kind].passes(cost)]
        if not refusing:
            return
        kind = max(refusing, key=lambda kind: self._buckets[kind].seconds_until(costs[kind]))
        bucket, seconds = self._buckets[kind], self._buckets[kind].seconds_until(costs[kind])
        raise RateLimited(
            f"The limit is {self._limits[kind]} {_WORDS[kind]} per minute: {bucket.remaining} are "
            f"left, and this takes {costs[kind]}. There is room in {seconds:.3f} s.",
            standing=self.standing,
            retry_after_seconds=seconds,
        )

    def pay(self, costs: Costs) -> None:
        """Take this from the buckets that there are; a negative cost gives back."""
        for kind in costs.keys() & self._buckets.keys():
            bucket = self._buckets[kind] = self._buckets[kind].paid(costs[kind])
            row = self._rows.get(kind)
            if row is None:
                row = self._rows[kind] = RateBucket(kind=kind)
                self._session.add(row)
            row.level = bucket.level
            row.clock, row.updated_at = bucket.at


def _bucket(row: RateBucket | None, limit: int, now: Reading) -> Bucket:
    if row is None:
        return Bucket.full(limit, now)
    return Bucket(limit, row.level, Reading(row.clock, row.updated_at)).refilled(now)
