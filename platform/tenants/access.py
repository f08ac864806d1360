"""On which tenant a caller acts."""

from __future__ import annotations

from ..errors import TenantNotFound
from ..keys.principal import AnyPrincipal, Principal
from ..sessions import PlatformSession
from . import service


def act_on_tenant(session: PlatformSession, caller: AnyPrincipal, slug: str | None) -> AnyPrincipal:
    """The caller within the tenant that it names; an operator may be within none.

    A tenant's key may name its own. Raises TenantNotFound, for others as for what is not there:
    whoever names another tenant is not to change things in its own.
    """
    if slug is None:
        return caller
    if isinstance(caller, Principal):
        if caller.tenant_slug != slug:
            raise TenantNotFound(f"No tenant has the slug {slug!r}.")
        return caller
    tenant = service.get_tenant(session, slug)
    return caller.within(tenant.id, tenant.slug, tenant.weight)
