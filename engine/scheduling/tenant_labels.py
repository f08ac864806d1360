"""Tenants by name, for as many as a metric may have labels."""

from __future__ import annotations

MAX_TENANTS = 50
OTHER_TENANTS = "_other"
"""All tenants beyond the first `MAX_TENANTS`; neither an id nor a slug."""


class TenantLabels(dict[str, str]):
    """The label of each tenant: `labels[tenant]`. The first ones have their own, all others one.

    Who came first keeps its label: a count that moved between the two could shrink.
    """

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        super().__init__()
        self._max_tenants = max_tenants

    def __missing__(self, tenant: str) -> str:
        if len(self) >= self._max_tenants:
            return OTHER_TENANTS
        self[tenant] = tenant
        return tenant
