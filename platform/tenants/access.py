"""Determines the tenant in which a caller acts."""

from __future__ import annotations

from dataclasses import replace

from ..errors import TenantNotFound
from ..keys.principal import AnyPrincipal, Principal
from ..quotas.limits import restrict_requests
from ..sessions import PlatformSession
from . import service


def act_on_tenant(session: PlatformSession, caller: AnyPrincipal, slug: str | None) -> AnyPrincipal:
    """The caller in the tenant that it names; an operator may name none.

    A tenant's key may name its own tenant. Raises TenantNotFound for any other name, existing or
    not, so that a caller who names another tenant does not change its own.
    """
    if slug is not None and not isinstance(caller, Principal):
        tenant = service.get_tenant(session, slug)
        caller = caller.within(tenant.id, tenant.slug, tenant.weight, tenant.slo)
    if not isinstance(caller, Principal):
        return caller
    if slug not in (None, caller.tenant_slug):
        raise TenantNotFound(f"No tenant has the slug {slug!r}.")
    return replace(caller, is_limited=restrict_requests(session, caller.tenant_id))
