"""The tables of limits, rate buckets and reservations of running requests."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, String, false, text
from sqlalchemy.orm import Mapped, mapped_column

from ..adapters.models import DIGEST_LENGTH
from ..base import ID_LENGTH, Base, TenantOwned, UtcDateTime, state_type, utc_now
from ..keys.token import KEY_ID_LENGTH
from ..names import MAX_NAME_LENGTH
from ..usage.models import REQUEST_ID_LENGTH
from .holder import MAX_HOLDER_LENGTH

CLOCK_ID_LENGTH = 64


class Period(StrEnum):
    """How long a token budget lasts; both begin at midnight UTC."""

    DAY = "day"
    MONTH = "month"


class RateKind(StrEnum):
    """What a bucket counts, per minute."""

    REQUESTS = "requests"
    INPUT_TOKENS = "input_tokens"
    OUTPUT_TOKENS = "output_tokens"


class Quota(TenantOwned, Base):
    """A tenant's limits. None is no limit; a tenant without a row has none."""

    __tablename__ = "quotas"

    tenant_id: Mapped[str] = mapped_column(
        String(ID_LENGTH), ForeignKey("tenants.id"), primary_key=True
    )
    requests_per_minute: Mapped[int | None]
    input_tokens_per_minute: Mapped[int | None]
    output_tokens_per_minute: Mapped[int | None]
    concurrent_requests: Mapped[int | None]
    tokens_per_period: Mapped[int | None] = mapped_column(BigInteger)
    """Prompt and completion tokens together."""
    trained_tokens_per_period: Mapped[int | None] = mapped_column(BigInteger)
    """Of all fine-tuning jobs together."""
    period: Mapped[Period] = mapped_column(state_type(Period, name="period"), default=Period.MONTH)
    adapters: Mapped[int | None]
    versions_per_adapter: Mapped[int | None]
    stored_bytes: Mapped[int | None] = mapped_column(BigInteger)
    keys: Mapped[int | None]
    users: Mapped[int | None]
    has_budgets: Mapped[bool] = mapped_column(default=False, server_default=false())
    """Whether the tenant, or one of its users or keys, has a budget of money."""
    has_caller_limits: Mapped[bool] = mapped_column(default=False, server_default=false())
    """Whether one of its users or keys has limits of its own."""
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now, onupdate=utc_now)


class RateBucket(TenantOwned, Base):
    """A token bucket of a rate. It fills by the clock that `clock` names."""

    __tablename__ = "rate_buckets"

    tenant_id: Mapped[str] = mapped_column(
        String(ID_LENGTH), ForeignKey("tenants.id"), primary_key=True
    )
    kind: Mapped[RateKind] = mapped_column(state_type(RateKind, name="kind"), primary_key=True)
    level: Mapped[float]
    """Negative after a request that cost more than was left."""
    clock: Mapped[str] = mapped_column(String(CLOCK_ID_LENGTH))
    """The clock of `updated_at`; by another clock no time has passed."""
    updated_at: Mapped[float]


class CallerLimits(TenantOwned, Base):
    """The limits of one user or key, besides those of its tenant. None is no limit."""

    __tablename__ = "caller_limits"

    tenant_id: Mapped[str] = mapped_column(
        String(ID_LENGTH), ForeignKey("tenants.id"), primary_key=True
    )
    holder: Mapped[str] = mapped_column(String(MAX_HOLDER_LENGTH), primary_key=True)
    requests_per_minute: Mapped[int | None]
    input_tokens_per_minute: Mapped[int | None]
    output_tokens_per_minute: Mapped[int | None]
    concurrent_requests: Mapped[int | None]
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now, onupdate=utc_now)


class CallerBucket(TenantOwned, Base):
    """A token bucket of a rate of one user or key; otherwise like `RateBucket`."""

    __tablename__ = "caller_buckets"

    tenant_id: Mapped[str] = mapped_column(
        String(ID_LENGTH), ForeignKey("tenants.id"), primary_key=True
    )
    holder: Mapped[str] = mapped_column(String(MAX_HOLDER_LENGTH), primary_key=True)
    kind: Mapped[RateKind] = mapped_column(state_type(RateKind, name="kind"), primary_key=True)
    level: Mapped[float]
    clock: Mapped[str] = mapped_column(String(CLOCK_ID_LENGTH))
    updated_at: Mapped[float]


class PeriodUse(TenantOwned, Base):
    """The tokens that a tenant used in one period, according to the ledger."""

    __tablename__ = "period_uses"

    tenant_id: Mapped[str] = mapped_column(
        String(ID_LENGTH), ForeignKey("tenants.id"), primary_key=True
    )
    period: Mapped[Period] = mapped_column(state_type(Period, name="period"), primary_key=True)
    begins_at: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    tokens: Mapped[int] = mapped_column(BigInteger, default=0)


class Reservation(TenantOwned, Base):
    """An admitted request that is not settled: what it may use, and its server.

    It is written before the engine receives the request, and removed in the transaction that writes
    the ledger's row. Requests of a tenant without request limits have none.
    """

    __tablename__ = "reservations"
    __table_args__ = (
        CheckConstraint("input_tokens >= 0 AND output_tokens >= 0", name="tokens"),
        Index("ix_reservations_tenant_id", "tenant_id"),
        Index("ix_reservations_server_id", "server_id"),
    )

    request_id: Mapped[str] = mapped_column(String(REQUEST_ID_LENGTH), primary_key=True)
    server_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    """The installation that serves it, and that settles it."""
    key_id: Mapped[str | None] = mapped_column(String(KEY_ID_LENGTH))
    user_id: Mapped[str | None] = mapped_column(String(ID_LENGTH))
    """Who called, or owns the key; None: a machine's key, or an operator."""
    adapter_name: Mapped[str | None] = mapped_column(String(MAX_NAME_LENGTH))
    adapter_version: Mapped[int | None]
    adapter_digest: Mapped[str | None] = mapped_column(String(DIGEST_LENGTH))
    input_tokens: Mapped[int]
    output_tokens: Mapped[int]
    """The most that it may generate."""
    amount: Mapped[int] = mapped_column(BigInteger, default=0, server_default=text("0"))
    """The most that it may cost, in 1e-9 of the currency's unit."""
    paid_input_tokens: Mapped[int]
    """The amount charged to the bucket of input tokens; 0 if there was none."""
    paid_output_tokens: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    clock: Mapped[str] = mapped_column(String(CLOCK_ID_LENGTH))
    """The clock of `expires_at`; by another clock it has expired."""
    expires_at: Mapped[float]
    """From then on it counts against no limit. Put off while its server lives."""
