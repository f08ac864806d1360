"""Queries on limits and on what they count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import (
    ColumnElement,
    Select,
    and_,
    bindparam,
    func,
    literal,
    or_,
    select,
    union_all,
    update,
)

from ..adapters.models import Adapter, AdapterVersion, Upload
from ..adapters.states import VISIBLE_STATES, UploadState, VersionState
from ..base import utc_now
from ..keys.models import ApiKey
from ..sessions import PlatformSession, TenantSession
from ..tenants.models import Tenant
from ..usage.models import UsageRecord
from ..users.models import User
from .bucket import Reading
from .models import Period, PeriodUse, Quota, RateBucket, RateKind, Reservation

_ON_THE_WAY = (UploadState.RECEIVING, UploadState.VALIDATING)


class Reserved(NamedTuple):
    """What running requests hold."""

    num_requests: int
    tokens: int
    """Input and output, the most that they may use."""


def find_quota(session: TenantSession) -> Quota | None:
    """The tenant's limits."""
    return session.scalars(select(Quota)).one_or_none()


def lock_quota(session: TenantSession) -> Quota | None:
    """The tenant's limits, which nobody else holds until this unit of work ends.

    Whoever takes or gives back something that they limit holds them meanwhile.
    """
    query = select(Quota).with_for_update()
    return session.scalars(query.execution_options(populate_existing=True)).one_or_none()


def lock_tenant(session: TenantSession) -> None:
    """Wait for the units of work that add rows of the tenant, and let none add any meanwhile."""
    session.execute(select(Tenant.id).with_for_update())


# --- rates and reservations ---------------------------------------------------------------------


def list_buckets(session: TenantSession) -> Mapping[RateKind, RateBucket]:
    """The tenant's buckets, as the database has them now."""
    query = select(RateBucket).execution_options(populate_existing=True)
    return {bucket.kind: bucket for bucket in session.scalars(query)}


def concerns_limits(session: TenantSession, request_id: str) -> bool:
    """The tenant has limits of some kind, or the request has reserved something."""
    return session.execute_pinned(_CONCERNS_LIMITS, {"request_id": request_id}).first() is not None


_CONCERNS_LIMITS = union_all(
    select(literal(1)).where(Quota.__table__.c.tenant_id == bindparam("tenant_id")),
    select(literal(1)).where(
        Reservation.__table__.c.tenant_id == bindparam("tenant_id"),
        Reservation.__table__.c.request_id == bindparam("request_id"),
    ),
).limit(1)


def find_quota_and_reservation(
    session: TenantSession, request_id: str
) -> tuple[Quota | None, Reservation | None]:
    """The tenant's limits, which others may hold, and what the request has reserved."""
    is_of_request = and_(Reservation.tenant_id == Tenant.id, Reservation.request_id == request_id)
    query = (
        select(Quota, Reservation)
        .select_from(Tenant)
        .outerjoin(Quota, Quota.tenant_id == Tenant.id)
        .outerjoin(Reservation, is_of_request)
    )
    row = session.execute(query.execution_options(populate_existing=True)).one()
    return row[0], row[1]


def sum_reservations(session: TenantSession, now: Reading) -> Reserved:
    """What the tenant's running requests have reserved; expired reservations count for nothing."""
    tokens = Reservation.input_tokens + Reservation.output_tokens
    query = select(func.count(Reservation.request_id), func.coalesce(func.sum(tokens), 0))
    row = session.execute(query.where(_is_alive(now))).one()
    return Reserved(row[0], int(row[1]))


def renew_reservations(
    session: PlatformSession, server_id: str, now: Reading, expires_at: float
) -> int:
    """Put off the expiry of all that this server has; how many they are.

    Those that are being settled are left out: waiting for one while holding another, which the same
    transaction settles next, would never end.
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


def _is_alive(now: Reading) -> ColumnElement[bool]:
    return and_(Reservation.clock == now.clock, Reservation.expires_at > now.seconds)


# --- budgets ------------------------------------------------------------------------------------


def find_period_use(session: TenantSession, period: Period, begin: datetime) -> PeriodUse | None:
    """What the tenant used in the period that began then, as the database has it now."""
    query = select(PeriodUse).where(PeriodUse.period == period, PeriodUse.begins_at == begin)
    return session.scalars(query.execution_options(populate_existing=True)).one_or_none()


def sum_ledger_tokens(session: TenantSession, since: datetime, until: datetime) -> int:
    """Prompt and completion tokens of the tenant's ledger in `[since, until)`."""
    tokens = UsageRecord.prompt_tokens + UsageRecord.completion_tokens
    query = select(func.coalesce(func.sum(tokens), 0)).where(
        UsageRecord.created_at >= since, UsageRecord.created_at < until
    )
    return int(session.scalar(query) or 0)


# --- what a tenant owns -------------------------------------------------------------------------


def count_adapters(session: TenantSession) -> int:
    """The adapters that have a visible version."""
    return _count(session, select(func.count(Adapter.id)).where(Adapter.is_visible.is_(True)))


def count_versions(session: TenantSession, adapter_name: str) -> int:
    """The visible versions of the adapter of this name; 0 if there is none."""
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
