"""The authenticated caller."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Scope(StrEnum):
    """What a key may do within its tenant."""

    INFER = "infer"
    """Generate with the base model and the tenant's adapters; list models."""
    ADAPTERS_READ = "adapters:read"
    """List and show adapters, versions and their reports."""
    ADAPTERS_WRITE = "adapters:write"
    """Push and delete adapters, move aliases."""
    USAGE_READ = "usage:read"
    """See what was used."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls: a tenant, by one of its keys."""

    tenant_id: str
    tenant_slug: str
    key_id: str
    scopes: frozenset[Scope]

    def can(self, scope: Scope) -> bool:
        """The key carries the scope."""
        return scope in self.scopes
