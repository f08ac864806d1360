"""Selects the adapters of tenants that exceed their share of a memory; they are evicted first.

A tenant's share is the capacity divided by the number of active tenants. A tenant that uses less
lends the rest to others until it needs it. So a tenant that uses ever more adapters evicts its own,
not those of others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from .identity import AdapterKey


class Holding(NamedTuple):
    """An adapter in a memory."""

    key: AdapterKey
    size: int
    last_used: float
    """Or any other number that orders them by their last use."""
    may_go: bool


class Surplus(NamedTuple):
    """The bytes held beyond the shares."""

    keys: frozenset[AdapterKey]
    """The adapters that may be evicted: the least recently used ones of tenants above their
    share."""
    is_newcomer_beyond: bool
    """Whether the tenant of the newcomer would hold more than its share with it."""


def find_surplus(
    holdings: Iterable[Holding],
    *,
    capacity: int,
    active: frozenset[str],
    newcomer: AdapterKey,
    newcomer_size: int,
) -> Surplus:
    """Judge as if the newcomer were here already. Tenants that are not in `active` have no share.

    The newcomer's tenant counts as active.
    """
    active |= {newcomer.tenant_id}
    share = capacity / len(active)
    by_tenant: defaultdict[str, list[Holding]] = defaultdict(list)
    for holding in holdings:
        by_tenant[holding.key.tenant_id].append(holding)
    keys: set[AdapterKey] = set()
    for tenant_id, held in by_tenant.items():
        beyond = sum(holding.size for holding in held)
        beyond += newcomer_size if tenant_id == newcomer.tenant_id else 0
        beyond -= int(share) if tenant_id in active else 0
        for holding in sorted(held, key=lambda holding: holding.last_used):
            if beyond <= 0:
                break
            if holding.may_go:
                keys.add(holding.key)
                beyond -= holding.size
    mine = sum(holding.size for holding in by_tenant.get(newcomer.tenant_id, ()))
    return Surplus(frozenset(keys), mine + newcomer_size > share)
