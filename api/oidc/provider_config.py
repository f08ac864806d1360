"""What the operator says about the identity provider."""

from __future__ import annotations

from dataclasses import dataclass, field

from .role_rules import RoleRule


@dataclass(frozen=True, slots=True)
class ProviderConfig:
    """What the operator says about the identity provider."""

    issuer: str
    client_id: str
    client_secret: str | None = field(repr=False)
    """None: a public client."""
    scopes: tuple[str, ...]
    name: str
    """On the console's button."""
    groups_claim: str
    rules: tuple[RoleRule, ...]
