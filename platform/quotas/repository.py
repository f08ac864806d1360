"""Queries on limits and on the usage that counts against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime
from functools import cache
from typing import Any, NamedTuple, cast

from sqlalchemy import (
    Executable,
    Select,
    Table,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from ..adapters.models import Adapter, AdapterVersion, Upload
from ..adapters.states import VISIBLE_STATES, UploadState, VersionState
from ..base import utc_now
from ..keys.models import ApiKey
from ..sessions import PlatformSession, TenantRows, TenantSession
from ..tenants.models import Tenant
from ..upserts import insert_into, primary_key
from ..usage.models import UsageDay, UsageRecord
from ..users.models import User
from .bucket import Reading
from .holder import Holder
from .models import (
    CallerBucket,
    CallerLimits,
    Period,
    PeriodUse,
    Quota,
    RateBucket,
    RateKind,
    Reservation,
)
from .running import CallerUse

_ON_THE_WAY = (UploadState.RECEIVING, UploadState.VALIDATING)


class Reserved(NamedTuple):
    """The amounts that running requests hold."""

    num_requests: int
    tokens: int
    """Input and output, the most that they may use."""


def find_quota(session: TenantSession) -> Quota | None:
    """The tenant's limits."""
    return session.scalars(select(Quota)).one_or_none()


def find_quota_of(session: PlatformSession, tenant_id: str) -> Quota | None:
    """This tenant's limits."""
    return session.get(Quota, tenant_id)


def lock_quota(session: TenantSession) -> Quota | None:
    """The tenant's limits, locked until this unit of work ends.

    Every change of what they limit locks them.
    """
    query = select(Quota).with_for_update()
    return session.scalars(query.execution_options(populate_existing=True)).one_or_none()


def lock_tenant(session: TenantSession) -> None:
    """Wait for the units of work that add rows of the tenant, and block new ones."""
    session.execute(select(Tenant.id).with_for_update())


def share_tenant(session: TenantSession) -> None:
    """Let `lock_tenant` wait for this unit of work, as one that adds rows of the tenant does."""
    session.execute(select(Tenant.id).with_for_update(read=True, key_share=True))


# --- rates and reservations ---------------------------------------------------------------------


class BucketRow(NamedTuple):
    """A bucket as it was last written."""

    level: float
    clock: str
    updated_at: float


class Settled(NamedTuple):
    """A removed reservation."""

    paid_input_tokens: int
    """The amount that the tenant's bucket was charged in advance."""
    paid_output_tokens: int
    input_tokens: int
    output_tokens: int
    user_id: str | None
    key_id: str | None


def lock_limits(session: TenantRows) -> Mapping[str, Any] | None:
    """All limits by their names, held like those of `lock_quota`; None if the tenant has none."""
    row = session.execute_pinned(_LOCK_LIMITS, {}).one_or_none()
    return None if row is None else row._asdict()


_QUOTAS = Quota.__table__
_LOCK_LIMITS = (
    select(*(c for c in _QUOTAS.c if c.name not in ("tenant_id", "updated_at")))
    .where(_QUOTAS.c.tenant_id == bindparam("tenant_id"))
    .with_for_update()
)


def list_buckets(session: TenantRows) -> Mapping[RateKind, BucketRow]:
    """The tenant's buckets, as the database has them now."""
    rows = session.execute_pinned(_LIST_BUCKETS, {})
    return {row[0]: BucketRow(*row[1:]) for row in rows}


_BUCKETS = RateBucket.__table__
_LIST_BUCKETS = select(
    _BUCKETS.c.kind, _BUCKETS.c.level, _BUCKETS.c.clock, _BUCKETS.c.updated_at
).where(_BUCKETS.c.tenant_id == bindparam("tenant_id"))


def write_buckets(session: TenantRows, buckets: Mapping[RateKind, BucketRow]) -> None:
    """Replace these buckets of the tenant, whose quota is locked."""
    rows = [{"kind": kind, **row._asdict()} for kind, row in buckets.items()]
    session.execute_pinned(_write_buckets(RateBucket, session.dialect), rows)


@cache
def _write_buckets(table: type[RateBucket | CallerBucket], dialect: str) -> Executable:
    statement = insert_into(table, dialect)
    changed = {name: statement.excluded[name] for name in BucketRow._fields}
    key = primary_key(table)
    return cast(Executable, statement.on_conflict_do_update(index_elements=key, set_=changed))


def add_reservations(session: TenantRows, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add reservations, all their columns but the tenant's and the time."""
    session.execute_pinned(_ADD_RESERVATIONS, rows)


_RESERVATIONS = cast(Table, Reservation.__table__)
_ADD_RESERVATIONS = insert(_RESERVATIONS).inline()


def remove_reservations(session: TenantRows, request_ids: Sequence[str]) -> Mapping[str, Settled]:
    """Remove the reservations of these requests; returns them by request."""
    rows = session.execute_pinned(_REMOVE_RESERVATIONS, {"request_ids": request_ids})
    return {row[0]: Settled(*row[1:]) for row in rows}


_REMOVE_RESERVATIONS = (
    delete(_RESERVATIONS)
    .where(
        _RESERVATIONS.c.tenant_id == bindparam("tenant_id"),
        _RESERVATIONS.c.request_id.in_(bindparam("request_ids", expanding=True)),
    )
    .returning(_RESERVATIONS.c.request_id, *(_RESERVATIONS.c[name] for name in Settled._fields))
)


def sum_reservations(session: TenantRows, now: Reading) -> Reserved:
    """The sum of the reservations of the tenant's running requests, without expired ones."""
    values = {"clock": now.clock, "seconds": now.seconds}
    row = session.execute_pinned(_SUM_RESERVATIONS, values).one()
    return Reserved(row[0], int(row[1]))


_SUM_RESERVATIONS = select(
    func.count(),
    func.coalesce(func.sum(_RESERVATIONS.c.input_tokens + _RESERVATIONS.c.output_tokens), 0),
).where(
    _RESERVATIONS.c.tenant_id == bindparam("tenant_id"),
    _RESERVATIONS.c.clock == bindparam("clock"),
    _RESERVATIONS.c.expires_at > bindparam("seconds"),
)


def list_running(session: TenantRows, now: Reading) -> Sequence[CallerUse]:
    """The same by user and key."""
    values = {"clock": now.clock, "seconds": now.seconds}
    rows = session.execute_pinned(_LIST_RUNNING, values)
    return [CallerUse(row[0], row[1], row[2], int(row[3])) for row in rows]


_CALLER = (_RESERVATIONS.c.user_id, _RESERVATIONS.c.key_id)
_LIST_RUNNING = (
    select(*_CALLER, func.count(), func.sum(_RESERVATIONS.c.amount))
    .where(
        _RESERVATIONS.c.tenant_id == bindparam("tenant_id"),
        _RESERVATIONS.c.clock == bindparam("clock"),
        _RESERVATIONS.c.expires_at > bindparam("seconds"),
    )
    .group_by(*_CALLER)
)


def list_caller_limits(
    session: TenantRows, holders: Sequence[Holder]
) -> Mapping[Holder, Mapping[str, Any]]:
    """The limits by name of those of these users and keys that have some."""
    rows = session.execute_pinned(_LIST_CALLER_LIMITS, {"holders": holders})
    return {row[0]: dict(zip(CALLER_LIMITS, row[1:], strict=True)) for row in rows}


CALLER_LIMITS = (*(f"{kind}_per_minute" for kind in RateKind), "concurrent_requests")
"""The names of the limits that a user or key may have."""
_LIMITS = CallerLimits.__table__
_LIST_CALLER_LIMITS = select(_LIMITS.c.holder, *(_LIMITS.c[name] for name in CALLER_LIMITS)).where(
    _LIMITS.c.tenant_id == bindparam("tenant_id"),
    _LIMITS.c.holder.in_(bindparam("holders", expanding=True)),
)


def list_caller_buckets(
    session: TenantRows, holders: Sequence[Holder]
) -> Mapping[Holder, Mapping[RateKind, BucketRow]]:
    """The buckets of these users and keys."""
    buckets: dict[Holder, dict[RateKind, BucketRow]] = {}
    for row in session.execute_pinned(_LIST_CALLER_BUCKETS, {"holders": holders}):
        buckets.setdefault(row[0], {})[row[1]] = BucketRow(*row[2:])
    return buckets


_CALLER_BUCKETS = CallerBucket.__table__
_LIST_CALLER_BUCKETS = select(
    *(_CALLER_BUCKETS.c[name] for name in ("holder", "kind", *BucketRow._fields))
).where(
    _CALLER_BUCKETS.c.tenant_id == bindparam("tenant_id"),
    _CALLER_BUCKETS.c.holder.in_(bindparam("holders", expanding=True)),
)


def write_caller_buckets(
    session: TenantRows, buckets: Mapping[Holder, Mapping[RateKind, BucketRow]]
) -> None:
    """Replace these buckets of users and keys, whose tenant's quota is locked."""
    rows = [
        {"holder": holder, "kind": kind, **row._asdict()}
        for holder, of_holder in buckets.items()
        for kind, row in of_holder.items()
    ]
    session.execute_pinned(_write_buckets(CallerBucket, session.dialect), rows)


def renew_reservations(
    session: PlatformSession, server_id: str, now: Reading, expires_at: float
) -> int:
    """Renew all reservations of this server; returns how many there are.

    Reservations that are being settled are skipped: waiting for one while holding another that the
    same transaction settles next would deadlock.
    """
    query = select(Reservation.request_id).where(Reservation.server_id == server_id)
    free = query.with_for_update(skip_locked=True)
    change = update(Reservation).where(Reservation.request_id.in_(free))
    values = {"clock": now.clock, "expires_at": expires_at}
    return len(session.execute(change.values(values).returning(Reservation.request_id)).all())


def list_reservations_of_server(session: PlatformSession, server_id: str) -> Sequence[Reservation]:
    """Every tenant's reservations that this server has, the oldest first."""
    query = select(Reservation).where(Reservation.server_id == server_id)
    return session.scalars(query.order_by(Reservation.created_at)).all()


def purge_reservations(session: PlatformSession, now: Reading, created_before: datetime) -> int:
    """Remove those that have expired and are older than that; how many."""
    has_expired = or_(Reservation.clock != now.clock, Reservation.expires_at <= now.seconds)
    removed = session.execute(
        delete(Reservation)
        .where(has_expired, Reservation.created_at < created_before)
        .returning(Reservation.request_id)
    )
    return len(removed.all())


# --- budgets ------------------------------------------------------------------------------------


def find_period_use(session: TenantSession, period: Period, begin: datetime) -> PeriodUse | None:
    """The tenant's usage in the period that began then, as in the database."""
    query = select(PeriodUse).where(PeriodUse.period == period, PeriodUse.begins_at == begin)
    return session.scalars(query.execution_options(populate_existing=True)).one_or_none()


def sum_period(session: TenantRows, period: Period, begin: datetime) -> int | None:
    """The tokens that the tenant used in the period that began then."""
    values = {"period": period, "begins_at": begin}
    tokens: int | None = session.execute_pinned(_SUM_PERIOD, values).scalar()
    return tokens


_PERIODS = PeriodUse.__table__
_SUM_PERIOD = select(_PERIODS.c.tokens).where(
    *(_PERIODS.c[name] == bindparam(name) for name in ("tenant_id", "period", "begins_at"))
)


def add_to_periods(
    session: TenantRows, period: Period, tokens: Sequence[tuple[datetime, int]]
) -> None:
    """Add tokens to the tenant's usage of the periods that began at these times."""
    rows = [{"period": period, "begins_at": begin, "tokens": num} for begin, num in tokens]
    session.execute_pinned(_add_to_periods(session.dialect), rows)


@cache
def _add_to_periods(dialect: str) -> Executable:
    statement = insert_into(PeriodUse, dialect)
    added = {"tokens": _PERIODS.c.tokens + statement.excluded.tokens}
    key = primary_key(PeriodUse)
    return cast(Executable, statement.on_conflict_do_update(index_elements=key, set_=added))


def sum_ledger_tokens(session: TenantSession, since: datetime, until: datetime) -> int:
    """Prompt and completion tokens of the tenant's ledger in `[since, until)`."""
    tokens = UsageRecord.prompt_tokens + UsageRecord.completion_tokens
    query = select(func.coalesce(func.sum(tokens), 0)).where(
        UsageRecord.created_at >= since, UsageRecord.created_at < until
    )
    return int(session.scalar(query) or 0)


def sum_trained_tokens(session: TenantSession, since: date, until: date) -> int:
    """What the tenant's fine-tuning jobs trained on from the day `since` to the day before
    `until`."""
    query = select(func.coalesce(func.sum(UsageDay.trained_tokens), 0)).where(
        UsageDay.day >= since, UsageDay.day < until
    )
    return _count(session, query)


# --- what a tenant owns -------------------------------------------------------------------------


def count_adapters(session: TenantSession) -> int:
    """The adapters that have a visible version."""
    return _count(session, select(func.count(Adapter.id)).where(Adapter.is_visible.is_(True)))


def count_versions(session: TenantSession, adapter_name: str) -> int:
    """The number of visible versions of the adapter with this name; 0 if there is none."""
    query = (
        select(func.count(AdapterVersion.id))
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .where(Adapter.name == adapter_name, AdapterVersion.state.in_(VISIBLE_STATES))
    )
    return _count(session, query)


def most_versions_of_an_adapter(session: TenantSession) -> int:
    """The visible versions of the adapter that has most of them."""
    number = func.count(AdapterVersion.id)
    query = (
        select(number)
        .where(AdapterVersion.state.in_(VISIBLE_STATES))
        .group_by(AdapterVersion.adapter_id)
        .order_by(number.desc())
    )
    return session.scalars(query.limit(1)).first() or 0


def sum_stored_bytes(session: TenantSession) -> int:
    """The bytes of the tenant's distinct contents that are not removed from the store."""
    first_of_content = (
        select(func.min(AdapterVersion.id))
        .where(AdapterVersion.state != VersionState.DELETED)
        .group_by(AdapterVersion.digest)
    )
    query = select(func.coalesce(func.sum(AdapterVersion.size_bytes), 0))
    return int(session.scalar(query.where(AdapterVersion.id.in_(first_of_content))) or 0)


def is_stored(session: TenantSession, digest: str) -> bool:
    """A version with this content is not removed from the store."""
    query = select(AdapterVersion.id).where(
        AdapterVersion.digest == digest, AdapterVersion.state != VersionState.DELETED
    )
    return session.scalars(query.limit(1)).first() is not None


def sum_expected_bytes(session: TenantSession) -> int:
    """The bytes that the tenant's unfinished uploads declare."""
    query = select(func.coalesce(func.sum(Upload.size_bytes), 0))
    return int(session.scalar(query.where(Upload.state.in_(_ON_THE_WAY))) or 0)


def count_usable_keys(session: TenantSession) -> int:
    """The keys that are neither revoked nor expired."""
    is_unexpired = or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > utc_now())
    query = select(func.count(ApiKey.id)).where(ApiKey.revoked_at.is_(None), is_unexpired)
    return _count(session, query)


def count_active_users(session: TenantSession) -> int:
    """The users that are not disabled."""
    return _count(session, select(func.count(User.id)).where(User.disabled_at.is_(None)))


def _count(session: TenantSession, query: Select[int]) -> int:
    return session.scalar(query) or 0
