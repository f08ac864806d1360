"""The `x-ratelimit-…` headers: a tenant's remaining rates, in the format of OpenAI's clients."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...platform.quotas.models import RateKind
from ...platform.quotas.standing import RateStanding, Standing, tightest_token_rate

_SECONDS_PER_MINUTE = 60


def limit_headers(standing: Standing) -> dict[str, str]:
    """For requests, and for the token rate with less remaining; none without limits."""
    rates = {
        "requests": standing.get(RateKind.REQUESTS),
        "tokens": tightest_token_rate(standing),
    }
    return dict(pair for name, rate in rates.items() if rate for pair in _headers(name, rate))


def duration(seconds: float) -> str:
    """In OpenAI's format, rounded up: `12ms`, `7.66s`, `1m0s`."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    whole, rest = divmod(milliseconds, 1000)
    minutes, whole = divmod(whole, _SECONDS_PER_MINUTE)
    fraction = f".{rest:03d}".rstrip("0") if rest else ""
    return f"{minutes}m{whole}{fraction}s" if minutes else f"{whole}{fraction}s"


def _headers(name: str, rate: RateStanding) -> Iterator[tuple[str, str]]:
    yield f"x-ratelimit-limit-{name}", str(rate.limit)
    yield f"x-ratelimit-remaining-{name}", str(rate.remaining)
    yield f"x-ratelimit-reset-{name}", duration(rate.reset_seconds)
