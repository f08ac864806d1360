"""The authenticated caller: identity, tenant and permissions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from ..networks import Network, is_covered
from ..tenants.slo import NO_SLO, Slo


class Scope(StrEnum):
    """What a caller may do within a tenant."""

    INFER = "infer"
    """Generate with the base model and the tenant's adapters; list models."""
    ADAPTERS_READ = "adapters:read"
    """List and show adapters, versions and their reports."""
    ADAPTERS_WRITE = "adapters:write"
    """Push and delete adapters, move aliases."""
    ADAPTERS_COMPOSE = "adapters:compose"
    """Name several adapters, or weights, in one request."""
    USAGE_READ = "usage:read"
    """Read usage, limits and requests."""
    AUDIT_READ = "audit:read"
    """See who changed what."""
    KEYS_MANAGE = "keys:manage"
    """Issue, rotate and revoke keys."""
    USERS_MANAGE = "users:manage"
    """Add, change and disable the tenant's users."""
    WEBHOOKS_READ = "webhooks:read"
    """See webhooks and their deliveries."""
    WEBHOOKS_WRITE = "webhooks:write"
    """Add, change, test and delete webhooks."""
    SAMPLES_READ = "samples:read"
    """Read samples of requests, and files made of them."""
    SAMPLES_WRITE = "samples:write"
    """Turn sampling on and off, delete samples."""


ALL_SCOPES = frozenset(Scope)
PRIVATE_SCOPES = frozenset({Scope.SAMPLES_READ, Scope.SAMPLES_WRITE})
"""The scopes that no operator has."""
READING_SCOPES = frozenset(
    {Scope.ADAPTERS_READ, Scope.USAGE_READ, Scope.AUDIT_READ, Scope.WEBHOOKS_READ}
)
SCOPES_OF_ADAPTERS = frozenset(
    {
        Scope.INFER,
        Scope.ADAPTERS_READ,
        Scope.ADAPTERS_WRITE,
        Scope.ADAPTERS_COMPOSE,
        Scope.KEYS_MANAGE,
        Scope.SAMPLES_READ,
        Scope.SAMPLES_WRITE,
    }
)
"""The scopes that a key restricted to adapters may have: the others affect the tenant's other
data."""


class TenantRole(StrEnum):
    """The role of a tenant's user."""

    OWNER = "owner"
    DEVELOPER = "developer"
    VIEWER = "viewer"

    @property
    def scopes(self) -> frozenset[Scope]:
        """The most that a user of this role may do."""
        return _SCOPES_OF_ROLE[self]


_SCOPES_OF_ROLE = {
    TenantRole.OWNER: ALL_SCOPES,
    TenantRole.DEVELOPER: frozenset(
        {
            Scope.INFER,
            Scope.ADAPTERS_READ,
            Scope.ADAPTERS_WRITE,
            Scope.ADAPTERS_COMPOSE,
            Scope.USAGE_READ,
        }
    ),
    TenantRole.VIEWER: frozenset({Scope.ADAPTERS_READ, Scope.USAGE_READ}),
}


class OperatorRole(StrEnum):
    """The role of an operator."""

    ADMIN = "admin"
    """Everything but `PRIVATE_SCOPES`, in every tenant."""
    VIEWER = "viewer"
    """See everything, change nothing, generate nothing."""

    @property
    def scopes(self) -> frozenset[Scope]:
        """What it may do in a tenant."""
        return ALL_SCOPES - PRIVATE_SCOPES if self is OperatorRole.ADMIN else READING_SCOPES


class ActorKind(StrEnum):
    """The kind of an actor."""

    OPERATOR = "operator"
    USER = "user"
    KEY = "key"
    SYSTEM = "system"
    """Upkeep, or a command on the server's own machine."""


AUTHOR_LENGTH = 300
"""The maximum length of `Actor.author`."""


@dataclass(frozen=True, slots=True)
class Actor:
    """The actor of a change, as the audit log names it."""

    kind: ActorKind
    id: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.id}"

    @property
    def author(self) -> str:
        """The name in histories: a key's id, otherwise the actor's name."""
        if self.kind is ActorKind.SYSTEM:
            return self.name
        return f"{self.kind}:{self.id if self.kind is ActorKind.KEY else self.name}"


SYSTEM = Actor(ActorKind.SYSTEM, "system", "system")


@dataclass(frozen=True, slots=True)
class Grant:
    """The permissions in a tenant: scopes, adapters, networks and expiry."""

    scopes: frozenset[Scope]
    adapters: frozenset[str] | None = None
    """By name; None: all adapters and the base model."""
    networks: tuple[Network, ...] | None = None
    """None: any."""
    expires_at: datetime | None = None
    """None: no expiry."""

    def excess(self, other: Grant) -> str | None:
        """The first field in which the other grant exceeds this one; None: no field.

        A caller cannot grant, or obtain, more than it has.
        """
        if not other.scopes <= self.scopes:
            return "scopes"
        if not self.covers_adapters(other.adapters):
            return "adapters"
        if not self._covers_networks(other.networks):
            return "networks"
        if not self._covers_end(other.expires_at):
            return "expires_at"
        return None

    def covers_adapters(self, adapters: frozenset[str] | None) -> bool:
        """Whether a caller restricted to these adapters sees only what this grant allows."""
        return self.adapters is None or (adapters is not None and adapters <= self.adapters)

    def _covers_networks(self, networks: tuple[Network, ...] | None) -> bool:
        if self.networks is None:
            return True
        own = self.networks
        return networks is not None and all(is_covered(network, own) for network in networks)

    def _covers_end(self, expires_at: datetime | None) -> bool:
        if self.expires_at is None:
            return True
        return expires_at is not None and expires_at <= self.expires_at


@dataclass(frozen=True, slots=True)
class SignedIn:
    """The caller is signed in at the console, and for how long."""

    account_id: str
    role: str
    """A TenantRole or an OperatorRole."""
    expires_at: datetime
    confirmed_until: datetime | None
    """Until then the confirmation by password or provider is valid."""
    issuer: str | None = None
    """The identity provider through which it signed in; None: with the password."""

    def is_confirmed(self, now: datetime) -> bool:
        """Whether actions that need the password again are allowed."""
        return self.confirmed_until is not None and now < self.confirmed_until


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A caller in one tenant: a key of the tenant, or an operator acting in it."""

    tenant_id: str
    tenant_slug: str
    actor: Actor
    scopes: frozenset[Scope]
    key_id: str | None
    """The tenant's key; None for an operator or a signed-in user."""
    adapters: frozenset[str] | None = None
    """The names of the adapters that the key is restricted to; None: all, and the base model."""
    networks: tuple[Network, ...] | None = None
    """The networks from which the key may be used; None: any."""
    expires_at: datetime | None = None
    """When the key ends; None: never."""
    tenant_weight: float = 1.0
    """The tenant's share of the device, in proportion to the others'."""
    tenant_slo: Slo = NO_SLO
    is_limited: bool = True
    """Whether the tenant's requests were limited at the look-up, or this is unknown."""
    operator_role: OperatorRole | None = None
    """The role of an operator acting in the tenant."""
    signed_in: SignedIn | None = None
    """None: it calls with a key."""

    @property
    def grant(self) -> Grant:
        """What the caller has and may grant.

        For an operator or a signed-in user it is what the role allows: the networks and expiry of
        this call do not limit the tenant's keys.
        """
        if self.key_id is None:
            return Grant(self.scopes, self.adapters)
        return Grant(self.scopes, self.adapters, self.networks, self.expires_at)

    @property
    def user_id(self) -> str | None:
        """The user who calls, or who owns the key; None: a machine's key, or an operator."""
        return self.actor.id if self.actor.kind is ActorKind.USER else None

    def can(self, scope: Scope) -> bool:
        """The caller may do this."""
        return scope in self.scopes

    def may_use(self, adapter_name: str | None) -> bool:
        """The caller may see this adapter at all; None is the base model."""
        return self.adapters is None or adapter_name in self.adapters


@dataclass(frozen=True, slots=True)
class OperatorPrincipal:
    """An operator without a tenant."""

    id: str
    name: str
    role: OperatorRole
    expires_at: datetime | None = None
    """When the key ends; None: never."""
    signed_in: SignedIn | None = None
    """None: it calls with a key."""
    networks: tuple[Network, ...] | None = None
    """The networks from which the key may be used; None: any."""

    @property
    def actor(self) -> Actor:
        """The actor as the audit log names it."""
        return Actor(ActorKind.OPERATOR, self.id, self.name)

    def within(
        self, tenant_id: str, tenant_slug: str, tenant_weight: float, tenant_slo: Slo = NO_SLO
    ) -> Principal:
        """The operator as a caller in this tenant."""
        return Principal(
            tenant_id=tenant_id,
            tenant_slug=tenant_slug,
            actor=self.actor,
            scopes=self.role.scopes,
            key_id=None,
            networks=self.networks,
            expires_at=self.expires_at,
            tenant_weight=tenant_weight,
            tenant_slo=tenant_slo,
            operator_role=self.role,
            signed_in=self.signed_in,
        )


AnyPrincipal = Principal | OperatorPrincipal
