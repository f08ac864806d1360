"""A tenant's current usage and remaining amounts, for the API and the console."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from ..sessions import TenantSession
from . import repository, resources
from .bucket import Reading
from .clock import Clock, moment_of, read_clock
from .limits import Limits, limits_of
from .models import RateKind
from .period import begin_of, end_of
from .rates import Rates
from .resources import Resource
from .training import count_trained_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitUse:
    """One limit and its usage."""

    limit: int | None
    """None is no limit."""
    used: int | None
    """None if the usage is not counted, because there is no limit."""
    reserved: int = 0
    """Reserved by running requests; not part of `used`."""
    remaining: int | None
    """None without a limit."""
    reset_seconds: float | None = None
    """For a rate: the time until the bucket is full if nothing is used."""


@dataclass(frozen=True, slots=True)
class QuotaUse:
    """All limits of a tenant, by their names, and the period that its budget is in."""

    limits: Limits
    uses: dict[str, LimitUse]
    period_begins_at: datetime
    period_ends_at: datetime


def current_use(session: TenantSession, *, clock: Clock = read_clock) -> QuotaUse:
    """The present usage of the session's tenant."""
    limits, now = limits_of(repository.find_quota(session)), clock(session)
    begin = begin_of(limits.period, moment_of(now))
    running = repository.sum_reservations(session, now)
    uses = {
        **_rates(session, limits, now),
        "concurrent_requests": _use(
            limits.concurrent_requests, running.num_requests if limits.restrict_requests else None
        ),
        "tokens_per_period": _use(
            limits.tokens_per_period, _period_tokens(session, limits, begin), running.tokens
        ),
        "trained_tokens_per_period": _use(
            limits.trained_tokens_per_period, count_trained_tokens(session, limits)
        ),
    }
    for resource in Resource:
        uses[resource] = _use(getattr(limits, resource), resources.count(session, resource))
    return QuotaUse(limits, uses, begin, end_of(limits.period, begin))


def _rates(session: TenantSession, limits: Limits, now: Reading) -> dict[str, LimitUse]:
    standing = Rates(limits, repository.list_buckets(session), now).standing
    uses = {}
    for kind in RateKind:
        rate = standing.get(kind)
        uses[f"{kind}_per_minute"] = LimitUse(
            limit=rate and rate.limit,
            used=rate and rate.limit - rate.remaining,
            remaining=rate and rate.remaining,
            reset_seconds=rate and rate.reset_seconds,
        )
    return uses


def _period_tokens(session: TenantSession, limits: Limits, begin: datetime) -> int | None:
    if limits.tokens_per_period is None:
        return None
    use = repository.find_period_use(session, limits.period, begin)
    return 0 if use is None else use.tokens


def _use(limit: int | None, used: int | None, reserved: int = 0) -> LimitUse:
    taken = (used or 0) + reserved
    remaining = None if limit is None else max(0, limit - taken)
    return LimitUse(limit=limit, used=used, reserved=reserved, remaining=remaining)
