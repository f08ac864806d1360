"""The remaining amounts of a tenant's rates, which every response reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .models import RateKind


class RateStanding(NamedTuple):
    """The remaining amount of one rate."""

    limit: int
    """Per minute."""
    remaining: int
    reset_seconds: float
    """The time until the bucket is full if nothing is used."""


Standing = Mapping[RateKind, RateStanding]
"""By limited rate."""


def tightest_token_rate(standing: Standing) -> RateStanding | None:
    """The input or output token rate with less remaining; None if neither is limited."""
    kinds = (RateKind.INPUT_TOKENS, RateKind.OUTPUT_TOKENS)
    limited = [standing[kind] for kind in kinds if kind in standing]
    return min(limited, key=lambda rate: rate.remaining, default=None)
