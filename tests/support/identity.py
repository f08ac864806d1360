"""Keys, users and callers for tests of permissions."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from loraplex.platform.keyring import Keyring
from loraplex.platform.keys.principal import (
    ALL_SCOPES,
    Actor,
    ActorKind,
    Principal,
    Scope,
    TenantRole,
)
from loraplex.platform.networks import parse_networks
from loraplex.platform.secrets import API_KEY_PEPPER
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.users.models import User


class SettableClock:
    """A clock that stands until it is set."""

    def __init__(self, now: datetime) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now


def peppers(*secrets: str) -> Keyring:
    """The peppers of these secrets, the present one first."""
    return Keyring([secret.encode() * 8 for secret in secrets], API_KEY_PEPPER)


def caller_of(
    tenant: Tenant,
    scopes: Iterable[Scope] = ALL_SCOPES,
    *,
    adapters: Iterable[str] | None = None,
    networks: Iterable[str] | None = None,
    expires_at: datetime | None = None,
    key_id: str | None = "0" * 12,
    user: User | None = None,
) -> Principal:
    """A caller in the tenant, as authentication would yield it."""
    actor = Actor(ActorKind.KEY, "0" * 12, "test")
    if user is not None:
        actor = Actor(ActorKind.USER, user.id, user.email)
        scopes = TenantRole(user.role).scopes
    return Principal(
        tenant_id=tenant.id,
        tenant_slug=tenant.slug,
        actor=actor,
        scopes=frozenset(scopes),
        key_id=key_id,
        adapters=None if adapters is None else frozenset(adapters),
        networks=None if networks is None else parse_networks(networks),
        expires_at=expires_at,
    )
