"""Reads and sets the limits of a tenant's users and keys."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sqlalchemy import or_, select

from ..errors import InvalidValue
from ..locked_rows import lock_or_add
from ..sessions import TenantSession
from .holder import Holder
from .limits import MAX_COUNT, lock_or_add_quota
from .models import CallerLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLimitSet:
    """The limits of a user or key, besides those of its tenant. None is no limit."""

    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


def get_caller_limits(session: TenantSession, holder: Holder) -> CallerLimitSet:
    """The limits of this user or key of the tenant."""
    query = select(CallerLimits).where(CallerLimits.holder == holder)
    row = session.scalars(query.execution_options(populate_existing=True)).one_or_none()
    names = CallerLimitSet.__slots__
    return CallerLimitSet(**{name: getattr(row, name, None) for name in names})


def set_caller_limits(session: TenantSession, holder: Holder, limits: CallerLimitSet) -> None:
    """Replace the limits of this user or key of the tenant. Raises InvalidValue."""
    for name, value in asdict(limits).items():
        if value is not None and not 1 <= value <= MAX_COUNT:
            raise InvalidValue(
                f"{name} must be from 1 to {MAX_COUNT}, or null for unlimited.", param=name
            )
    quota = lock_or_add_quota(session)
    row = lock_or_add(session, CallerLimits(tenant_id=session.tenant_id, holder=holder))
    for name, value in asdict(limits).items():
        setattr(row, name, value)
    session.flush()
    quota.has_caller_limits = _has_any(session)
    session.flush()


def copy_caller_limits(session: TenantSession, source: Holder, target: Holder) -> None:
    """Give the target the limits of the source."""
    limits = get_caller_limits(session, source)
    if limits != CallerLimitSet():
        set_caller_limits(session, target, limits)


def _has_any(session: TenantSession) -> bool:
    """Whether any user or key of the tenant has a limit."""
    columns = (getattr(CallerLimits, name) for name in CallerLimitSet.__slots__)
    is_limited = [column.is_not(None) for column in columns]
    query = select(CallerLimits.holder).where(or_(*is_limited)).limit(1)
    return session.scalars(query).first() is not None
