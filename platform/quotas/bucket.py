"""The token bucket that enforces a rate per minute. Pure, without a database or a clock.

A bucket holds one minute's worth and fills evenly. A request passes if the bucket holds at least
its cost, or is full if the cost exceeds the capacity; then it pays in full. So a bucket grants at
most its level plus its inflow, plus one request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

SECONDS_PER_MINUTE = 60.0
_ROUNDING = 1e-6
"""In tokens: a caller who waited as long as it was told must not fail by a rounding error."""


class Reading(NamedTuple):
    """A clock's reading."""

    clock: str
    """The clock's id; the difference of two clocks' readings is meaningless."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """The level of a rate's bucket at some moment."""

    capacity: float
    """The rate per minute."""
    level: float
    """Negative after a request that cost more than was left."""
    at: Reading

    @classmethod
    def full(cls, capacity: float, now: Reading) -> Bucket:
        """A full bucket."""
        return cls(capacity, capacity, now)

    def refilled(self, now: Reading) -> Bucket:
        """The bucket at this time. A clock that went back, or another clock, adds nothing."""
        elapsed = now.seconds - self.at.seconds if now.clock == self.at.clock else 0.0
        gained = max(0.0, elapsed) * self.capacity / SECONDS_PER_MINUTE
        return replace(self, level=min(self.capacity, self.level + gained), at=now)

    def passes(self, cost: float) -> bool:
        """A request of this cost may pay now; one that costs nothing of it always may."""
        return not cost or self.level + _ROUNDING >= min(cost, self.capacity)

    def seconds_until(self, cost: float) -> float:
        """When a request with this cost passes if no other comes first; 0 if it passes now."""
        return self._seconds_to(min(cost, self.capacity))

    def paid(self, cost: float) -> Bucket:
        """The bucket after a payment; a negative cost refunds, up to the capacity."""
        return replace(self, level=min(self.capacity, self.level - cost))

    @property
    def remaining(self) -> int:
        """The level in whole units."""
        return max(0, math.floor(self.level + _ROUNDING))

    @property
    def seconds_until_full(self) -> float:
        return self._seconds_to(self.capacity)

    def _seconds_to(self, level: float) -> float:
        return max(0.0, level - self.level) * SECONDS_PER_MINUTE / self.capacity
