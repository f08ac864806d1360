"""The table of the request log: every generation request, answered or refused."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Index, String
from sqlalchemy.orm import Mapped, mapped_column

from ..base import Base, TenantOwned, UtcDateTime
from ..keys.token import KEY_ID_LENGTH
from ..names import MAX_NAME_LENGTH
from ..usage.models import REQUEST_ID_LENGTH

ROUTE_LENGTH = 64
MODEL_LENGTH = 200
CODE_LENGTH = 64


LogRow = Mapping[str, Any]
"""All columns of an entry, by name."""


class RequestLogEntry(TenantOwned, Base):
    """One request and its phases. For diagnosis, not for accounting: entries may be missing."""

    __tablename__ = "request_log"
    __table_args__ = (
        Index(
            "ix_request_log_tenant_id_created_at_request_id",
            "tenant_id",
            "created_at",
            "request_id",
        ),
        Index("ix_request_log_created_at", "created_at"),
    )

    request_id: Mapped[str] = mapped_column(String(REQUEST_ID_LENGTH), primary_key=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    key_id: Mapped[str | None] = mapped_column(String(KEY_ID_LENGTH))
    route: Mapped[str] = mapped_column(String(ROUTE_LENGTH))
    status: Mapped[int]
    """0: the client disconnected before the response."""
    error_code: Mapped[str | None] = mapped_column(String(CODE_LENGTH))
    model: Mapped[str | None] = mapped_column(String(MODEL_LENGTH))
    """The pinned name, or the requested name if it was not resolved; None if unknown."""
    adapter_name: Mapped[str | None] = mapped_column(String(MAX_NAME_LENGTH))
    adapter_version: Mapped[int | None]
    finish_reason: Mapped[str | None] = mapped_column(String(32))
    tier: Mapped[str | None] = mapped_column(String(16))
    prompt_tokens: Mapped[int | None]
    cached_tokens: Mapped[int | None]
    completion_tokens: Mapped[int | None]
    queue_ms: Mapped[float | None]
    adapter_wait_ms: Mapped[float | None]
    load_ms: Mapped[float | None]
    first_token_ms: Mapped[float | None]
    total_ms: Mapped[float]
