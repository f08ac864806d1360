"""Queries on API keys."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select

from ..sessions import PlatformSession, TenantSession
from ..tenants.models import Tenant
from .models import ApiKey


def list_keys(session: TenantSession) -> Sequence[ApiKey]:
    """The tenant's keys, the oldest first."""
    return session.scalars(select(ApiKey).order_by(ApiKey.created_at, ApiKey.id)).all()


def find(session: TenantSession, key_id: str) -> ApiKey | None:
    """The tenant's key of this id."""
    return session.scalars(select(ApiKey).where(ApiKey.id == key_id)).one_or_none()


def find_for_any_tenant(session: PlatformSession, key_id: str) -> tuple[ApiKey, Tenant] | None:
    """The key of this id and whose it is: only authentication may ask this."""
    query = (
        select(ApiKey, Tenant)
        .join(Tenant, Tenant.id == ApiKey.tenant_id)
        .where(ApiKey.id == key_id)
    )
    row = session.execute(query).one_or_none()
    return None if row is None else (row[0], row[1])
