"""Records usage exactly once, and sums it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from itertools import compress

from sqlalchemy.exc import IntegrityError

from ..base import utc_now
from ..errors import RequestNotFound
from ..quotas import service as quotas
from ..quotas.service import HeldLimits, Used
from ..sessions import PlatformSession, ScopeViolation, TenantRows, TenantSession
from . import repository
from .models import UsageDay, UsageRecord
from .repository import DeviceUsage, UsageQuery, UsageSum


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The usage of a request until its end, however it ended."""

    request_id: str
    adapter_name: str | None = None
    """None for the base model, as the two below."""
    adapter_version: int | None = None
    adapter_digest: str | None = None
    composition: str | None = None
    """See `UsageRecord`."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tier: str | None = None
    finish_reason: str
    key_id: str | None = None
    load_ms: float | None = None
    user_id: str | None = None
    """Who called, or owns the key."""
    price_id: int | None = None
    """The price that it is charged by; None: there is none."""
    amount: int = 0
    """What it is charged, in 1e-9 of the currency's unit."""
    step_nanoseconds: int = 0
    kv_byte_seconds: int = 0
    loaded_bytes: int = 0
    fetched_bytes: int = 0
    cost: int = 0
    """What it costs the operator, in the unit of `amount`."""
    ended_at: datetime = field(default_factory=utc_now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Steps of a fine-tuning job that were done by this time."""

    adapter_name: str
    num_tokens: int
    amount: int
    """What they cost, in 1e-9 of the currency's unit."""
    user_id: str | None
    """Who created the job, or owns the key that did."""
    key_id: str | None
    at: datetime


def record(session: TenantRows, usage: Usage) -> bool:
    """Add the request to the tenant's ledger and to its day, and settle it.

    False if it is already there.
    """
    with quotas.hold(session) as held:
        return record_all(session, [usage], held)[0]


def record_all(session: TenantRows, usages: Sequence[Usage], held: HeldLimits) -> list[bool]:
    """The same for several requests in one unit of work, for each of them.

    First all rows, then the limits, last the days: so two servers never wait for each other.
    """
    are_new = _add(session, usages)
    news = list(compress(usages, are_new))
    held.settle(
        [
            Used(
                request_id=usage.request_id,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                user_id=usage.user_id,
                key_id=usage.key_id,
                amount=usage.amount,
                at=usage.ended_at,
            )
            for usage in news
        ]
    )
    _add_to_days(session, news)
    return are_new


def add_device_usage(session: TenantSession, usages: Sequence[DeviceUsage]) -> None:
    """Add byte-seconds on the device to the daily sums.

    They count for the lowest version of the content that is not deleted, or of all if none is left.
    """
    byte_seconds: Counter[tuple[date, str, int]] = Counter()
    for usage in usages:
        version = repository.find_version_of_content(session, usage.digest)
        if version is not None:
            byte_seconds[usage.day, *version] += usage.byte_seconds
    for key, amount in sorted(byte_seconds.items()):  # in the order of `record_all`
        _day_row(session, *key).residency_byte_seconds += amount
    session.flush()


def add_training(session: TenantSession, training: Training) -> None:
    """Add what a fine-tuning job trained on to the adapter's and the caller's sums of the day."""
    day = training.at.astimezone(UTC).date()
    sums = _day_row(session, day, training.adapter_name, 0)
    sums.trained_tokens += training.num_tokens
    sums.amount += training.amount
    session.flush()
    row = {
        "day": day,
        "user_id": training.user_id or "",
        "key_id": training.key_id or "",
        "trained_tokens": training.num_tokens,
        "amount": training.amount,
    }
    repository.add_to_training_day(session, row)


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
    """The sums of all tenants; the query may group by tenant and select one."""
    return repository.sum_days_of_all_tenants(session, query)


def _add(session: TenantRows, usages: Sequence[Usage]) -> list[bool]:
    """Add the requests' rows; False for existing ones."""
    rows = [
        {**{name: getattr(usage, name) for name in _COLUMNS}, "created_at": usage.ended_at}
        for usage in usages
    ]
    new_ids = Counter(repository.add_records(session, rows) if rows else ())
    are_new = []
    for usage in usages:
        are_new.append(bool(new_ids[usage.request_id]))
        new_ids[usage.request_id] = 0  # the same again is not new
        if not are_new[-1] and not repository.has_record(session, usage.request_id):
            raise ScopeViolation("a request of another tenant")
    return are_new


_COLUMNS = tuple(name for name in Usage.__slots__ if name != "ended_at")


def _add_to_days(session: TenantRows, usages: Sequence[Usage]) -> None:
    days: dict[tuple[date, str, int], Counter[str]] = {}
    for usage in usages:
        day = usage.ended_at.astimezone(UTC).date()
        key = (day, usage.adapter_name or "", usage.adapter_version or 0)
        days.setdefault(key, Counter()).update(_sums(usage))
    rows = [
        {"day": day, "adapter_name": name, "adapter_version": version, **sums}
        for (day, name, version), sums in sorted(days.items())
    ]
    if rows:
        repository.add_to_days(session, rows)


def _sums(usage: Usage) -> dict[str, int]:
    """Its contribution to the daily sums."""
    return {
        "num_requests": 1,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "num_cold_loads": int(bool(usage.load_ms)),
        "amount": usage.amount,
        "step_nanoseconds": usage.step_nanoseconds,
        "kv_byte_seconds": usage.kv_byte_seconds,
        "loaded_bytes": usage.loaded_bytes,
        "fetched_bytes": usage.fetched_bytes,
        "cost": usage.cost,
    }


def _day_row(session: TenantSession, day: date, name: str, version: int) -> UsageDay:
    """The sums of one day, created if they do not exist and locked against other writers."""
    row = repository.lock_day(session, day, name, version)
    if row is not None:
        return row
    try:
        with session.begin_nested():
            session.add(UsageDay.begin(day, name, version))
    except IntegrityError:
        pass  # another server was faster
    row = repository.lock_day(session, day, name, version)
    assert row is not None, "it was inserted here or by a concurrent transaction"
    return row
