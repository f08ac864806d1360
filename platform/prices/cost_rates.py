"""What the engine's resources cost the operator. Exact: no floats."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from .money import MAX_AMOUNT, NANOS, parse_money

MAX_RATE = 10**6 * NANOS
"""The highest rate."""
_HOUR = 3600
_NANOSECONDS = 10**9
_GIB = 2**30


class CostRates(NamedTuple):
    """Rates in 1e-9 of the currency's unit."""

    per_step_hour: int = 0
    """Of an hour of an engine's steps."""
    per_kv_gib_hour: int = 0
    """Of a GiB of KV blocks held for an hour."""
    per_loaded_gib: int = 0
    """Of a GiB of adapters copied to the device."""

    def cost(self, *, step_nanoseconds: int, kv_byte_seconds: int, loaded_bytes: int) -> int:
        """What this costs, rounded once, half up."""
        exact = (
            Fraction(self.per_step_hour * step_nanoseconds, _HOUR * _NANOSECONDS)
            + Fraction(self.per_kv_gib_hour * kv_byte_seconds, _HOUR * _GIB)
            + Fraction(self.per_loaded_gib * loaded_bytes, _GIB)
        )
        return min(int(exact + Fraction(1, 2)), MAX_AMOUNT)


NO_RATES = CostRates()


def parse_rate(text: str) -> int:
    """The rate of a decimal string. Raises InvalidValue."""
    return parse_money(text, param="rate", most=MAX_RATE)
