"""Queries on tenants. All are the platform's, because a tenant never reads other tenants."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Select, func, or_, select

from ..sessions import PlatformSession
from .models import Tenant


def list_tenants(
    session: PlatformSession,
    *,
    after: str | None = None,
    limit: int | None = None,
    is_suspended: bool | None = None,
    search: str | None = None,
) -> Sequence[Tenant]:
    """Tenants by slug, without those that are being deleted: at most `limit` after the slug
    `after`.

    `search`: a part of the slug or the display name, in either case.
    """
    query = _tenants().order_by(Tenant.slug).limit(limit)
    if after is not None:
        query = query.where(Tenant.slug > after)
    if is_suspended is not None:
        query = query.where(Tenant.suspended_at.is_not(None) == is_suspended)
    if search is not None:
        named = (Tenant.slug, func.lower(Tenant.name))
        query = query.where(
            or_(*(column.contains(search.lower(), autoescape=True) for column in named))
        )
    return session.scalars(query).all()


def find_by_slug(session: PlatformSession, slug: str) -> Tenant | None:
    """The tenant of this slug, unless it is being deleted."""
    return session.scalars(_tenant(slug)).one_or_none()


def find_and_lock(session: PlatformSession, slug: str) -> Tenant | None:
    """The same as the database has it now, locked against other writers of tenants."""
    locked = _tenant(slug).with_for_update(key_share=True)
    return session.scalars(locked.execution_options(populate_existing=True)).one_or_none()


def _tenant(slug: str) -> Select[Tenant]:
    return _tenants().where(Tenant.slug == slug)


def _tenants() -> Select[Tenant]:
    return select(Tenant).where(Tenant.deleting_at.is_(None))


def slugs_by_id(session: PlatformSession) -> dict[str, str]:
    """The slug of every tenant."""
    return {row.id: row.slug for row in session.execute(select(Tenant.id, Tenant.slug))}


def slugs_of(session: PlatformSession, tenant_ids: Collection[str]) -> dict[str, str]:
    """The slug of each of these tenants, by id."""
    query = select(Tenant.id, Tenant.slug).where(Tenant.id.in_(tenant_ids))
    return {row.id: row.slug for row in session.execute(query)}
