"""Making, finding and suspending tenants."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.exc import IntegrityError

from ..base import utc_now
from ..errors import InvalidValue, TenantExists, TenantNotFound
from ..names import check_slug
from ..sessions import PlatformSession
from . import repository
from .models import MAX_DISPLAY_NAME_LENGTH, Tenant


def create_tenant(session: PlatformSession, slug: str, *, name: str | None = None) -> Tenant:
    """Add a tenant. Raises InvalidValue or TenantExists."""
    tenant = Tenant(slug=check_slug(slug), name=_check_display_name(name))
    try:
        with session.begin_nested():
            session.add(tenant)
    except IntegrityError as exc:
        raise TenantExists(f"A tenant with the slug {slug!r} exists already.") from exc
    return tenant


def list_tenants(session: PlatformSession) -> Sequence[Tenant]:
    """Every tenant, by slug."""
    return repository.list_all(session)


def get_tenant(session: PlatformSession, slug: str) -> Tenant:
    """The tenant of this slug. Raises TenantNotFound."""
    tenant = repository.find_by_slug(session, slug)
    if tenant is None:
        raise TenantNotFound(f"No tenant has the slug {slug!r}.")
    return tenant


def suspend_tenant(session: PlatformSession, slug: str) -> Tenant:
    """Refuse the tenant's keys from now on; its adapters stay. Idempotent."""
    tenant = get_tenant(session, slug)
    tenant.suspended_at = tenant.suspended_at or utc_now()
    return tenant


def resume_tenant(session: PlatformSession, slug: str) -> Tenant:
    """Accept the tenant's keys again. Idempotent."""
    tenant = get_tenant(session, slug)
    tenant.suspended_at = None
    return tenant


def _check_display_name(name: str | None) -> str | None:
    if name is not None and not 1 <= len(name) <= MAX_DISPLAY_NAME_LENGTH:
        raise InvalidValue(f"A name has 1 to {MAX_DISPLAY_NAME_LENGTH} characters.", param="name")
    return name
