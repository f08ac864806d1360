"""The table of a tenant's API keys."""

from __future__ import annotations

from sqlalchemy import JSON, ForeignKeyConstraint, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from ..base import ID_LENGTH, Base, TenantOwned
from .principal import Grant, Scope
from .stored_key import StoredKey
from .token import KEY_ID_LENGTH

MAX_ACTOR_LENGTH = 64


class ApiKey(StoredKey, TenantOwned, Base):
    """A tenant's key: its permissions and its owner."""

    __tablename__ = "api_keys"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        ForeignKeyConstraint(["tenant_id", "user_id"], ["users.tenant_id", "users.id"]),
        ForeignKeyConstraint(["tenant_id", "successor_id"], ["api_keys.tenant_id", "api_keys.id"]),
    )

    scopes: Mapped[list[str]] = mapped_column(JSON)
    user_id: Mapped[str | None] = mapped_column(String(ID_LENGTH))
    """The owner, whose permissions limit the key; None: a machine's key."""
    adapters: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """The names of the adapters it is restricted to; None: all, and the base model."""
    successor_id: Mapped[str | None] = mapped_column(String(KEY_ID_LENGTH))
    """The key that replaces it; `expires_at` is then the end of the overlap."""
    created_by: Mapped[str] = mapped_column(String(MAX_ACTOR_LENGTH))
    """The actor, as `str(Actor)` writes it."""

    @property
    def grant(self) -> Grant:
        """The key's permissions, without the limits of its user's role."""
        return Grant(
            scopes=frozenset(map(Scope, self.scopes)),
            adapters=None if self.adapters is None else frozenset(self.adapters),
            networks=self.allowed_networks,
            expires_at=self.expires_at,
        )
