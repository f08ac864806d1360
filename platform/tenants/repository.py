"""Queries on tenants. All are the platform's: a tenant never looks at others."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select

from ..sessions import PlatformSession
from .models import Tenant


def list_all(session: PlatformSession) -> Sequence[Tenant]:
    """Every tenant, by slug."""
    return session.scalars(select(Tenant).order_by(Tenant.slug)).all()


def find_by_slug(session: PlatformSession, slug: str) -> Tenant | None:
    """The tenant of this slug."""
    return session.scalars(select(Tenant).where(Tenant.slug == slug)).one_or_none()
