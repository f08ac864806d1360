"""The API key as it is stored: its id and the keyed hash of its text, never the text."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import JSON, ForeignKeyConstraint, LargeBinary, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from ..base import ID_LENGTH, Base, TenantOwned, UtcDateTime, utc_now
from .token import KEY_ID_LENGTH

MAX_KEY_NAME_LENGTH = 200
MAX_ACTOR_LENGTH = 64


class ApiKey(TenantOwned, Base):
    """A key of a tenant. Revoked keys stay: what they made refers to them."""

    __tablename__ = "api_keys"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        ForeignKeyConstraint(["tenant_id", "user_id"], ["users.tenant_id", "users.id"]),
        ForeignKeyConstraint(["tenant_id", "successor_id"], ["api_keys.tenant_id", "api_keys.id"]),
    )

    id: Mapped[str] = mapped_column(String(KEY_ID_LENGTH), primary_key=True)
    name: Mapped[str] = mapped_column(String(MAX_KEY_NAME_LENGTH))
    mac: Mapped[bytes] = mapped_column(LargeBinary(32))
    """HMAC-SHA256 of the key's whole text under the server's pepper."""
    scopes: Mapped[list[str]] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    last_used_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """To the hour: see `LAST_USED_GRANULARITY`."""
    user_id: Mapped[str | None] = mapped_column(String(ID_LENGTH))
    """Whose it is: it may do no more than its user; None: a machine's."""
    adapters: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """The names of the adapters it is restricted to; None: all, and the base model."""
    networks: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """The networks (CIDR) it may come from; None: any."""
    successor_id: Mapped[str | None] = mapped_column(String(KEY_ID_LENGTH))
    """The key that replaces it; `expires_at` is then the end of the overlap."""
    created_by: Mapped[str | None] = mapped_column(String(MAX_ACTOR_LENGTH))
    """The actor, as `str(Actor)` writes it; None for keys older than that."""
