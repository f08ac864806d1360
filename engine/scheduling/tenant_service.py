"""What each tenant has been served, for as many tenants as a metric may have labels."""

from __future__ import annotations

from collections import Counter

MAX_TENANTS = 50
OTHER_TENANTS = "_other"
"""All tenants beyond the first `MAX_TENANTS`; neither an id nor a slug."""


class TenantLabels:
    """The tenants that came first by name, all others under one.

    Who came first keeps its name: a count that moved between the two could shrink.
    """

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._named: set[str] = set()

    def label(self, tenant: str) -> str:
        if len(self._named) < self._max_tenants:
            self._named.add(tenant)
        return tenant if tenant in self._named else OTHER_TENANTS


class TenantService:
    """Tokens computed for each tenant."""

    def __init__(self) -> None:
        self._labels = TenantLabels()
        self._tokens: Counter[str] = Counter()

    def add(self, tenant_id: str, num_tokens: int) -> None:
        self._tokens[self._labels.label(tenant_id)] += num_tokens

    def snapshot(self) -> list[tuple[str, int]]:
        return list(self._tokens.items())
