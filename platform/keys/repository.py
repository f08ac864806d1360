"""Queries on API keys."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import ColumnElement, Select, and_, func, or_, select, tuple_

from ..sessions import PlatformSession, TenantSession
from ..tenants.models import Tenant
from ..users.models import User
from .models import ApiKey


class KeyHolder(NamedTuple):
    """A key with its tenant and its user."""

    key: ApiKey
    tenant: Tenant
    user: User | None


def list_keys(
    session: TenantSession,
    *,
    after: str | None = None,
    limit: int | None = None,
    user_id: str | None = None,
    active_at: datetime | None = None,
) -> Sequence[ApiKey]:
    """The tenant's keys, oldest first: at most `limit` after the key `after`."""
    query = select(ApiKey).order_by(ApiKey.created_at, ApiKey.id).limit(limit)
    if after is not None:
        last = select(ApiKey.created_at, ApiKey.id).where(ApiKey.id == after)
        query = query.where(tuple_(ApiKey.created_at, ApiKey.id) > last.scalar_subquery())
    if user_id is not None:
        query = query.where(ApiKey.user_id == user_id)
    if active_at is not None:
        query = query.where(ApiKey.revoked_at.is_(None), _is_unexpired(active_at))
    return session.scalars(query).all()


def find(session: TenantSession, key_id: str) -> ApiKey | None:
    """The tenant's key of this id, as the database has it now."""
    return session.scalars(_key(key_id)).one_or_none()


def find_and_lock(session: TenantSession, key_id: str) -> ApiKey | None:
    """The same, locked against other writers until this unit of work ends."""
    return session.scalars(_key(key_id).with_for_update()).one_or_none()


def find_for_any_tenant(session: PlatformSession, key_id: str) -> KeyHolder | None:
    """The key with this id and its owner; for authentication only."""
    query = (
        select(ApiKey, Tenant, User)
        .join(Tenant, Tenant.id == ApiKey.tenant_id)
        .outerjoin(User, and_(User.tenant_id == ApiKey.tenant_id, User.id == ApiKey.user_id))
        .where(ApiKey.id == key_id)
    )
    row = session.execute(query).one_or_none()
    return None if row is None else KeyHolder(*row)


def count_ending_in_all_tenants(session: PlatformSession, now: datetime, until: datetime) -> int:
    """The number of usable keys that end before then and have no successor."""
    query = select(func.count()).where(
        ApiKey.revoked_at.is_(None),
        ApiKey.successor_id.is_(None),
        ApiKey.expires_at > now,
        ApiKey.expires_at <= until,
    )
    return session.scalar(query) or 0


def count_by_secret(session: PlatformSession) -> dict[str, int]:
    """How many unrevoked keys of all tenants are signed under each of the server's secrets."""
    query = (
        select(ApiKey.secret_id, func.count())
        .where(ApiKey.revoked_at.is_(None))
        .group_by(ApiKey.secret_id)
    )
    return {row[0]: row[1] for row in session.execute(query)}


def _key(key_id: str) -> Select[ApiKey]:
    query = select(ApiKey).where(ApiKey.id == key_id)
    return query.execution_options(populate_existing=True)


def _is_unexpired(now: datetime) -> ColumnElement[bool]:
    return or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now)
