"""The names of tenants, for lists that span several tenants."""

from __future__ import annotations

from collections.abc import Set

from ...platform.tenants import repository
from .control_plane import ControlPlane


async def tenant_names(control_plane: ControlPlane, tenant_ids: Set[str]) -> dict[str, str]:
    """The slug of each of these tenants."""
    return await control_plane.read_all_tenants(
        lambda session: repository.slugs_of(session, tenant_ids)
    )
