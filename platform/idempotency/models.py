"""The table of stored responses, by the key that the client chose."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from ..base import ID_LENGTH, Base, UtcDateTime, utc_now

MAX_IDEMPOTENCY_KEY_LENGTH = 255
OWNER_LENGTH = 64


class IdempotentAnswer(Base):
    """One `Idempotency-Key` of one caller: reserved when the request begins, completed when it
    ends."""

    __tablename__ = "idempotent_answers"

    owner: Mapped[str] = mapped_column(String(OWNER_LENGTH), primary_key=True)
    """The id of the API key or session of the request: others do not get the stored response."""
    key: Mapped[str] = mapped_column(String(MAX_IDEMPOTENCY_KEY_LENGTH), primary_key=True)
    request_hash: Mapped[bytes] = mapped_column(LargeBinary(32))
    """The hash of method, path, query, tenant and body: using the key for another request is an
    error."""
    request_id: Mapped[str] = mapped_column(String(64))
    """The id of the request that reserved the key: the audit log shows whether it changed
    anything."""
    server_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    """The server that executes it."""
    status: Mapped[int | None]
    """None while it runs."""
    answer: Mapped[bytes | None] = mapped_column(LargeBinary)
    """Headers and body, encrypted; None if it was lost."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now, index=True)
