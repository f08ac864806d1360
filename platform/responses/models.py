"""The table of stored responses."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Index, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from ..base import Base, TenantOwned, UtcDateTime, utc_now
from ..keys.token import KEY_ID_LENGTH

RESPONSE_ID_LENGTH = 40


class StoredResponse(TenantOwned, Base):
    """A response that has ended, with the input of its request. Only `expires_at` changes."""

    __tablename__ = "responses"
    __table_args__ = (
        Index("ix_responses_tenant_id_size_bytes", "tenant_id", "size_bytes"),
        Index("ix_responses_expires_at", "expires_at"),
    )

    id: Mapped[str] = mapped_column(String(RESPONSE_ID_LENGTH), primary_key=True)
    key_id: Mapped[str | None] = mapped_column(String(KEY_ID_LENGTH))
    """The key that requested it; None for an operator or a user."""
    previous_id: Mapped[str | None] = mapped_column(String(RESPONSE_ID_LENGTH))
    """The response that it continues, which may have been deleted since."""
    size_bytes: Mapped[int]
    """Of `input` and `response`."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)
    input: Mapped[bytes] = mapped_column(LargeBinary)
    """The items of the request itself, without those of earlier responses: a JSON array."""
    response: Mapped[bytes] = mapped_column(LargeBinary)
    """The response as it was returned: JSON."""
