"""Reads and sets a tenant's limits."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from datetime import datetime

from sqlalchemy.exc import IntegrityError

from ..errors import InvalidValue
from ..sessions import PlatformSession, TenantSession
from . import repository
from .clock import Clock, moment_of, read_clock
from .models import Period, PeriodUse, Quota, RateKind
from .period import begin_of, end_of

MAX_COUNT = 2**31 - 1
"""The maximum of a count column."""
MAX_BIG = 2**53
"""The largest integer that every JSON parser represents exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A tenant's limits on use and resources. None is no limit; the fields are those of `Quota`."""

    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_period: int | None = None
    trained_tokens_per_period: int | None = None
    period: Period = Period.MONTH
    adapters: int | None = None
    versions_per_adapter: int | None = None
    stored_bytes: int | None = None
    keys: int | None = None
    users: int | None = None

    @property
    def restrict_requests(self) -> bool:
        """Whether requests need admission; otherwise at most owned resources are limited."""
        return any(getattr(self, name) is not None for name in _FLOWS)

    def rate(self, kind: RateKind) -> int | None:
        """The limit per minute of this bucket."""
        limit: int | None = getattr(self, f"{kind}_per_minute")
        return limit


NO_LIMITS = Limits()
_FLOWS = frozenset(
    {*(f"{kind}_per_minute" for kind in RateKind), "concurrent_requests", "tokens_per_period"}
)
"""Limits on requests: at least 1, because a tenant without requests is suspended instead."""
_BIG = frozenset({"tokens_per_period", "trained_tokens_per_period", "stored_bytes"})


def get_limits(session: TenantSession) -> Limits:
    """The tenant's limits."""
    return limits_of(repository.find_quota(session))


def restrict_requests(session: PlatformSession, tenant_id: str) -> bool:
    """The tenant's requests have to ask, for limits or budgets of its own or of its callers."""
    quota = repository.find_quota_of(session, tenant_id)
    if quota is None:
        return False
    return limits_of(quota).restrict_requests or quota.has_budgets or quota.has_caller_limits


def limits_of(quota: Quota | None) -> Limits:
    """The limits in a row; without a row there are none."""
    if quota is None:
        return NO_LIMITS
    return Limits(**{field.name: getattr(quota, field.name) for field in fields(Limits)})


def lock_limits(session: TenantSession) -> Limits:
    """The tenant's limits, locked until the end of the unit of work; created if they do not
    exist."""
    return limits_of(lock_or_add_quota(session))


def set_limits(session: TenantSession, limits: Limits, *, clock: Clock = read_clock) -> None:
    """Replace the tenant's limits; existing usage counts against them. Raises InvalidValue.

    A budget counts the whole period, including the part before the budget was set.
    """
    _check(limits)
    quota = lock_or_add_quota(session)
    for name, value in asdict(limits).items():
        setattr(quota, name, value)
    if limits.tokens_per_period is not None:
        _count_period(session, limits.period, moment_of(clock(session)))
    session.flush()


def lock_or_add_quota(session: TenantSession) -> Quota:
    """The row of the tenant's limits, locked until the end of the unit of work."""
    quota = repository.lock_quota(session)
    if quota is not None:
        return quota
    quota = Quota()
    try:
        with session.begin_nested():
            session.add(quota)
    except IntegrityError:
        added_meanwhile = repository.lock_quota(session)
        assert added_meanwhile is not None, "quotas are never removed"
        return added_meanwhile
    # Transactions that are settling did not see the limit and hold nothing of it: let them end
    # first.
    repository.lock_tenant(session)
    return quota


def _count_period(session: TenantSession, period: Period, moment: datetime) -> None:
    """Set the usage of the period of this time from the ledger."""
    begin = begin_of(period, moment)
    use = repository.find_period_use(session, period, begin)
    if use is None:
        use = PeriodUse(period=period, begins_at=begin)
        session.add(use)
    use.tokens = repository.sum_ledger_tokens(session, begin, end_of(period, begin))


def _check(limits: Limits) -> None:
    for name, value in asdict(limits).items():
        if name == "period" or value is None:
            continue
        low, high = int(name in _FLOWS), MAX_BIG if name in _BIG else MAX_COUNT
        if not low <= value <= high:
            raise InvalidValue(
                f"{name} must be from {low} to {high}, or null for unlimited.", param=name
            )
