"""Counting what was used, exactly once, and adding it up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime

from sqlalchemy.exc import IntegrityError

from ..base import utc_now
from ..errors import RequestNotFound
from ..quotas import service as quotas
from ..sessions import PlatformSession, TenantSession
from . import repository
from .models import UsageDay, UsageRecord
from .repository import Residency, UsageQuery, UsageSum


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request used until it ended, however it ended."""

    request_id: str
    adapter_name: str | None = None
    """None for the base model, as the two below."""
    adapter_version: int | None = None
    adapter_digest: str | None = None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tier: str | None = None
    finish_reason: str
    key_id: str | None = None
    load_ms: float | None = None
    ended_at: datetime = field(default_factory=utc_now)


def record(session: TenantSession, usage: Usage) -> bool:
    """Add the request to the tenant's ledger and to its day, and settle it.

    False if it is there already.
    """
    try:
        with session.begin_nested():
            session.add(_row(usage))
    except IntegrityError:
        if repository.find(session, usage.request_id) is None:
            raise
        return False
    quotas.settle(
        session,
        usage.request_id,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        at=usage.ended_at,
    )
    day = _day(session, usage.ended_at, usage.adapter_name, usage.adapter_version)
    day.num_requests += 1
    day.prompt_tokens += usage.prompt_tokens
    day.cached_tokens += usage.cached_tokens
    day.completion_tokens += usage.completion_tokens
    day.num_cold_loads += bool(usage.load_ms)
    session.flush()
    return True


def add_residency(session: TenantSession, residencies: Sequence[Residency]) -> None:
    """Add to each day how long which content was on the device.

    It counts for the lowest version of that content that is not deleted, of any if all are.
    """
    for residency in sorted(residencies):
        version = repository.find_version_of_content(session, residency.digest)
        if version is not None:
            day = _day_row(session, residency.day, *version)
            day.residency_byte_seconds += residency.byte_seconds
    session.flush()


def get_record(session: TenantSession, request_id: str) -> UsageRecord:
    """The tenant's row of this request. Raises RequestNotFound."""
    found = repository.find(session, request_id)
    if found is None:
        raise RequestNotFound
    return found


def sum_usage(session: TenantSession, query: UsageQuery) -> Sequence[UsageSum]:
    """The tenant's sums, one for each group, in the order of the groups."""
    return repository.sum_days(session, query)


def sum_usage_of_all_tenants(session: PlatformSession, query: UsageQuery) -> Sequence[UsageSum]:
    """Everybody's sums; the query may group by tenant and narrow to one."""
    return repository.sum_days_of_all_tenants(session, query)


def _row(usage: Usage) -> UsageRecord:
    return UsageRecord(
        request_id=usage.request_id,
        adapter_name=usage.adapter_name,
        adapter_version=usage.adapter_version,
        adapter_digest=usage.adapter_digest,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        tier=usage.tier,
        finish_reason=usage.finish_reason,
        created_at=usage.ended_at,
        key_id=usage.key_id,
        load_ms=usage.load_ms,
    )


def _day(
    session: TenantSession, moment: datetime, name: str | None, version: int | None
) -> UsageDay:
    return _day_row(session, moment.astimezone(UTC).date(), name or "", version or 0)


def _day_row(session: TenantSession, day: date, name: str, version: int) -> UsageDay:
    """The sums of one day, made if they are not there; nobody else changes them meanwhile."""
    row = repository.lock_day(session, day, name, version)
    if row is not None:
        return row
    try:
        with session.begin_nested():
            session.add(UsageDay.begin(day, name, version))
    except IntegrityError:
        pass  # another server was faster
    row = repository.lock_day(session, day, name, version)
    assert row is not None, "it is there: by us or by whoever was faster"
    return row
