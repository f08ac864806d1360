"""Queries on the usage ledger and its sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple, cast

from sqlalchemy import ColumnElement, Executable, Select, bindparam, case, func, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute

from ..adapters.models import Adapter, AdapterVersion
from ..adapters.states import VersionState
from ..sessions import PlatformSession, TenantRows, TenantSession
from ..tenants.models import Tenant
from ..upserts import insert_into, primary_key
from .models import TrainingDay, UsageDay, UsageRecord


class Group(StrEnum):
    """The groupings of sums, in the order of sorting."""

    TENANT = "tenant"
    DAY = "day"
    ADAPTER = "adapter"
    VERSION = "version"


_COLUMNS: dict[Group, InstrumentedAttribute[Any]] = {
    Group.TENANT: Tenant.slug,
    Group.DAY: UsageDay.day,
    Group.ADAPTER: UsageDay.adapter_name,
    Group.VERSION: UsageDay.adapter_version,
}

GroupKey = tuple[str | date | int, ...]
"""The values of a query's groups, in their order."""


class UsageQuery(NamedTuple):
    """Which days are summed, and how."""

    groups: tuple[Group, ...]
    """In the order of Group; a version is always one of an adapter."""
    since: date | None = None
    until: date | None = None
    """The end of the range, exclusive."""
    adapter_name: str | None = None
    """Empty for the base model."""
    tenant_slug: str | None = None
    after: GroupKey | None = None
    limit: int | None = None


class UsageSum(NamedTuple):
    """The sums of one group."""

    key: GroupKey
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    num_cold_loads: int
    residency_byte_seconds: int
    trained_tokens: int
    amount: int
    """In 1e-9 of the currency's unit."""
    step_nanoseconds: int = 0
    kv_byte_seconds: int = 0
    loaded_bytes: int = 0
    fetched_bytes: int = 0
    cost: int = 0
    """In 1e-9 of the currency's unit."""


NOTHING = UsageSum((), 0, 0, 0, 0, 0, 0, 0, 0)
_SUMS = UsageSum._fields[1:]
"""The columns of a daily row."""


class DeviceUsage(NamedTuple):
    """Byte-seconds of one content on the device on one day."""

    day: date
    digest: str
    byte_seconds: int


def find(session: TenantSession, request_id: str) -> UsageRecord | None:
    """The tenant's row of this request."""
    query = select(UsageRecord).where(UsageRecord.request_id == request_id)
    return session.scalars(query).one_or_none()


REQUEST_SUMS = (
    "num_requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "num_cold_loads",
    "amount",
    "step_nanoseconds",
    "kv_byte_seconds",
    "loaded_bytes",
    "fetched_bytes",
    "cost",
)
"""The columns of a daily row that sum requests."""


def add_records(session: TenantRows, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Add rows, all their columns but the tenant's, for requests that have none yet.

    The ids of those requests.
    """
    return list(session.execute_pinned(_add_records(session.dialect), rows).scalars())


@cache
def _add_records(dialect: str) -> Executable:
    statement = insert_into(UsageRecord, dialect)
    statement = statement.on_conflict_do_nothing(index_elements=["request_id"])
    return cast(Executable, statement.returning(UsageRecord.__table__.c.request_id))


def has_record(session: TenantRows, request_id: str) -> bool:
    """The tenant has a row of this request."""
    return session.execute_pinned(_HAS_RECORD, {"request_id": request_id}).first() is not None


_RECORDS = UsageRecord.__table__
_HAS_RECORD = select(_RECORDS.c.request_id).where(
    _RECORDS.c.tenant_id == bindparam("tenant_id"),
    _RECORDS.c.request_id == bindparam("request_id"),
)


def add_to_days(session: TenantRows, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add to the tenant's daily sums, identified by the day's key and the names of all request
    sums.

    Rows are created if they do not exist, and locked until the unit of work ends.
    """
    session.execute_pinned(_add_to_days(session.dialect), rows)


@cache
def _add_to_days(dialect: str) -> Executable:
    statement = insert_into(UsageDay, dialect).values(residency_byte_seconds=0, trained_tokens=0)
    sums = {name: UsageDay.__table__.c[name] + statement.excluded[name] for name in REQUEST_SUMS}
    key = primary_key(UsageDay)
    return cast(Executable, statement.on_conflict_do_update(index_elements=key, set_=sums))


def add_to_training_day(session: TenantRows, row: Mapping[str, Any]) -> None:
    """Add to a row of `TrainingDay`, all its columns but the tenant's; it is created if it does not
    exist."""
    session.execute_pinned(_add_to_training_day(session.dialect), row)


@cache
def _add_to_training_day(dialect: str) -> Executable:
    statement = insert_into(TrainingDay, dialect)
    columns = TrainingDay.__table__.c
    sums = {name: columns[name] + statement.excluded[name] for name in ("trained_tokens", "amount")}
    key = primary_key(TrainingDay)
    return cast(Executable, statement.on_conflict_do_update(index_elements=key, set_=sums))


def lock_day(session: TenantSession, day: date, name: str, version: int) -> UsageDay | None:
    """The tenant's sums of this day, locked until the unit of work ends."""
    query = (
        select(UsageDay)
        .where(
            UsageDay.day == day,
            UsageDay.adapter_name == name,
            UsageDay.adapter_version == version,
        )
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    return session.scalars(query).one_or_none()


def find_version_of_content(session: TenantSession, digest: str) -> tuple[str, int] | None:
    """Adapter name and number of the version that a content counts for."""
    is_deleted = case((AdapterVersion.state == VersionState.DELETED, 1), else_=0)
    query = (
        select(Adapter.name, AdapterVersion.number)
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .where(AdapterVersion.digest == digest)
        .order_by(is_deleted, AdapterVersion.number, Adapter.name)
        .limit(1)
    )
    found = session.execute(query).one_or_none()
    return None if found is None else (found[0], found[1])


def sum_days(session: TenantSession, query: UsageQuery) -> Sequence[UsageSum]:
    """The tenant's sums, in the order of their keys."""
    return _sums(session.execute(_select_sums(query)).all(), query)


def sum_days_of_all_tenants(session: PlatformSession, query: UsageQuery) -> Sequence[UsageSum]:
    """The sums of all tenants, in the order of their keys."""
    return _sums(session.execute(_select_sums(query)).all(), query)


def _select_sums(query: UsageQuery) -> Select[*tuple[Any, ...]]:
    groups = [_COLUMNS[group] for group in query.groups]
    selected = (
        select(
            *groups,
            *(func.coalesce(func.sum(UsageDay.__table__.c[name]), 0) for name in _SUMS),
        )
        .select_from(UsageDay)
        .join(Tenant, Tenant.id == UsageDay.tenant_id)
        .where(*_conditions(query))
        .limit(query.limit)
    )
    return selected.group_by(*groups).order_by(*groups) if groups else selected


def _conditions(query: UsageQuery) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if query.since is not None:
        conditions.append(UsageDay.day >= query.since)
    if query.until is not None:
        conditions.append(UsageDay.day < query.until)
    if query.adapter_name is not None:
        conditions.append(UsageDay.adapter_name == query.adapter_name)
    if query.tenant_slug is not None:
        conditions.append(Tenant.slug == query.tenant_slug)
    if query.after is not None:
        columns = tuple_(*(_COLUMNS[group] for group in query.groups))
        conditions.append(columns > tuple_(*query.after))
    return conditions


def _sums(rows: Sequence[Any], query: UsageQuery) -> list[UsageSum]:
    num_groups = len(query.groups)
    return [
        UsageSum(tuple(row[:num_groups]), *(int(value) for value in row[num_groups:]))
        for row in rows
    ]
