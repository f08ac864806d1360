"""The table of the ledger: one row per finished request, never changed."""

from __future__ import annotations

from datetime import date, datetime
from typing import Self

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from ..adapters.models import DIGEST_LENGTH
from ..base import ID_LENGTH, Base, TenantOwned, UtcDateTime, utc_now
from ..keys.token import KEY_ID_LENGTH
from ..names import MAX_NAME_LENGTH

REQUEST_ID_LENGTH = 64


class UsageRecord(TenantOwned, Base):
    """The usage of one request. It names the adapter by value, so the row outlives it."""

    __tablename__ = "usage_records"
    __table_args__ = (
        CheckConstraint(
            "prompt_tokens >= 0 AND completion_tokens >= 0"
            " AND cached_tokens >= 0 AND cached_tokens <= prompt_tokens",
            name="tokens",
        ),
        Index("ix_usage_records_tenant_id_created_at", "tenant_id", "created_at"),
    )

    request_id: Mapped[str] = mapped_column(String(REQUEST_ID_LENGTH), primary_key=True)
    """Made by the server: a request is counted once, however often it is reported."""
    adapter_name: Mapped[str | None] = mapped_column(String(MAX_NAME_LENGTH))
    """None for the base model, as the two below."""
    adapter_version: Mapped[int | None]
    adapter_digest: Mapped[str | None] = mapped_column(String(DIGEST_LENGTH))
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    """Of the prompt, those that the prefix cache held."""
    completion_tokens: Mapped[int]
    tier: Mapped[str | None] = mapped_column(String(16))
    """Where the adapter was when the request came."""
    finish_reason: Mapped[str] = mapped_column(String(32))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    key_id: Mapped[str | None] = mapped_column(String(KEY_ID_LENGTH))
    """Whose request it was, by value; None for an operator's."""
    load_ms: Mapped[float | None]
    """How long the load took that the request waited for; None for the base model."""


class UsageDay(TenantOwned, Base):
    """The usage of one adapter version by one tenant on one day (UTC): sums of the ledger's rows.

    They change in the transaction that adds to the ledger, so the two never differ.
    """

    __tablename__ = "usage_days"
    __table_args__ = (
        Index("ix_usage_days_tenant_id_adapter_name_day", "tenant_id", "adapter_name", "day"),
    )

    tenant_id: Mapped[str] = mapped_column(
        String(ID_LENGTH), ForeignKey("tenants.id"), primary_key=True
    )
    day: Mapped[date] = mapped_column(primary_key=True)
    adapter_name: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH), primary_key=True)
    """Empty for the base model: a key has no room for nothing."""
    adapter_version: Mapped[int] = mapped_column(primary_key=True)
    """0 for the base model."""
    num_requests: Mapped[int] = mapped_column(BigInteger, default=0)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    cached_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    completion_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    num_cold_loads: Mapped[int] = mapped_column(BigInteger, default=0)
    """Requests that waited for a load."""
    residency_byte_seconds: Mapped[int] = mapped_column(BigInteger, default=0)
    """Bytes on the device times how long."""

    @classmethod
    def begin(cls, day: date, adapter_name: str, adapter_version: int) -> Self:
        """Sums of nothing."""
        return cls(
            day=day,
            adapter_name=adapter_name,
            adapter_version=adapter_version,
            num_requests=0,
            prompt_tokens=0,
            cached_tokens=0,
            completion_tokens=0,
            num_cold_loads=0,
            residency_byte_seconds=0,
        )
