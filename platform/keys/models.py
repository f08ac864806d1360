"""The API key as it is stored: its id and the keyed hash of its text, never the text."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import JSON, LargeBinary, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from ..base import Base, TenantOwned, UtcDateTime, utc_now
from .token import KEY_ID_LENGTH

MAX_KEY_NAME_LENGTH = 200


class ApiKey(TenantOwned, Base):
    """A key of a tenant. Revoked keys stay: what they made refers to them."""

    __tablename__ = "api_keys"
    __table_args__ = (UniqueConstraint("tenant_id", "id"),)

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
