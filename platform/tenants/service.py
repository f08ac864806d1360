"""Creates, finds, changes and suspends tenants."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.exc import IntegrityError

from ..base import utc_now
from ..errors import InvalidValue, TenantExists, TenantNotFound
from ..names import check_slug
from ..sessions import PlatformSession
from . import repository
from .models import MAX_DISPLAY_NAME_LENGTH, Tenant
from .slo import NO_SLO, Slo

MIN_WEIGHT = 0.01
MAX_WEIGHT = 100.0


def create_tenant(
    session: PlatformSession,
    slug: str,
    *,
    name: str | None = None,
    weight: float = 1.0,
    slo: Slo = NO_SLO,
) -> Tenant:
    """Add a tenant. Raises InvalidValue or TenantExists."""
    tenant = Tenant(slug=check_slug(slug), name=_check_display_name(name))
    set_weight(tenant, weight)
    set_slo(tenant, slo)
    try:
        with session.begin_nested():
            session.add(tenant)
    except IntegrityError as exc:
        message = f"A tenant with the slug {slug!r} already exists, or is being deleted."
        raise TenantExists(message) from exc
    return tenant


def list_tenants(
    session: PlatformSession,
    *,
    after: str | None = None,
    limit: int | None = None,
    is_suspended: bool | None = None,
) -> Sequence[Tenant]:
    """Tenants by slug: at most `limit` after the slug `after`."""
    return repository.list_tenants(session, after=after, limit=limit, is_suspended=is_suspended)


def get_tenant(session: PlatformSession, slug: str) -> Tenant:
    """The tenant of this slug. Raises TenantNotFound."""
    return _found(repository.find_by_slug(session, slug), slug)


def get_tenant_to_change(session: PlatformSession, slug: str) -> Tenant:
    """The same, locked until this unit of work ends. Raises TenantNotFound."""
    return _found(repository.find_and_lock(session, slug), slug)


def set_suspended(tenant: Tenant, is_suspended: bool) -> None:
    """Refuse the tenant's keys, or accept them again; the first suspension's time stays."""
    tenant.suspended_at = (tenant.suspended_at or utc_now()) if is_suspended else None


def rename(tenant: Tenant, name: str | None) -> None:
    """Give the tenant another name for people, or none. Raises InvalidValue."""
    tenant.name = _check_display_name(name)


def set_weight(tenant: Tenant, weight: float) -> None:
    """Give the tenant another share of the device. Raises InvalidValue."""
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise InvalidValue(f"A weight must be from {MIN_WEIGHT} to {MAX_WEIGHT}.", param="weight")
    tenant.weight = weight


def set_slo(tenant: Tenant, slo: Slo) -> None:
    """Give the tenant other targets. Raises InvalidValue."""
    slo.check()
    tenant.target_ttft_ms, tenant.target_itl_ms = slo.ttft_ms, slo.itl_ms


def _found(tenant: Tenant | None, slug: str) -> Tenant:
    if tenant is None:
        raise TenantNotFound(f"No tenant has the slug {slug!r}.")
    return tenant


def _check_display_name(name: str | None) -> str | None:
    if name is not None and not 1 <= len(name) <= MAX_DISPLAY_NAME_LENGTH:
        raise InvalidValue(
            f"A name must have 1 to {MAX_DISPLAY_NAME_LENGTH} characters.", param="name"
        )
    return name
