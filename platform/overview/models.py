"""The tables of the overview. All figures are sums, so time steps and servers can be added.

A gauge (such as running sequences) is stored as its value multiplied by the seconds it held.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from ..base import ID_LENGTH, Base, JsonObject, TenantOwned, UtcDateTime
from ..names import MAX_NAME_LENGTH

Counts = dict[str, int]
"""Such as a histogram of `latencies`: by the bucket's number, as JSON has only texts for keys."""


class Figures:
    """The figures of one time step of one server."""

    num_requests: Mapped[int] = mapped_column(BigInteger, default=0)
    num_errors: Mapped[int] = mapped_column(BigInteger, default=0)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    output_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    num_cold_loads: Mapped[int] = mapped_column(BigInteger, default=0)
    num_judged: Mapped[int] = mapped_column(BigInteger, default=0, server_default=text("0"))
    num_met: Mapped[int] = mapped_column(BigInteger, default=0, server_default=text("0"))
    running_seconds: Mapped[float] = mapped_column(Float, default=0.0)
    waiting_seconds: Mapped[float] = mapped_column(Float, default=0.0)
    kv_block_seconds: Mapped[float] = mapped_column(Float, default=0.0)
    adapter_byte_seconds: Mapped[float] = mapped_column(Float, default=0.0)
    first_token_counts: Mapped[Counts] = mapped_column(JSON, default=dict)
    token_gap_counts: Mapped[Counts] = mapped_column(JSON, default=dict)
    objective_counts: Mapped[Counts | None] = mapped_column(JSON(none_as_null=True), default=dict)
    """By who set the objective and the result; None in rows of servers that did not count them."""


class ServerSample(Figures, Base):
    """The figures of all tenants on one server."""

    __tablename__ = "server_samples"
    __table_args__ = (Index("ix_server_samples_step_seconds_at", "step_seconds", "at"),)

    server_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    step_seconds: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """When the step began, in seconds since 1970."""
    kv_capacity_seconds: Mapped[float] = mapped_column(Float, default=0.0)
    """The number of KV blocks multiplied by their duration."""


class TenantSample(Figures, TenantOwned, Base):
    """One tenant's figures on one server; without figures there is no row."""

    __tablename__ = "tenant_samples"
    __table_args__ = (Index("ix_tenant_samples_step_seconds_at", "step_seconds", "at"),)

    tenant_id: Mapped[str] = mapped_column(
        String(ID_LENGTH), ForeignKey("tenants.id"), primary_key=True
    )
    server_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    step_seconds: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[int] = mapped_column(BigInteger, primary_key=True)


class AdapterUse(TenantOwned, Base):
    """The recent use of an adapter, for long lists; the name outlives the adapter."""

    __tablename__ = "adapter_uses"

    tenant_id: Mapped[str] = mapped_column(
        String(ID_LENGTH), ForeignKey("tenants.id"), primary_key=True
    )
    adapter_name: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH), primary_key=True)
    last_used_at: Mapped[datetime] = mapped_column(UtcDateTime)
    latency_counts: Mapped[Counts] = mapped_column(JSON, default=dict)
    """From arrival to the last byte, of the latest requests."""
    p95_ms: Mapped[float] = mapped_column(Float)
    """The percentile of `latency_counts`."""
    num_requests: Mapped[int] = mapped_column(BigInteger, default=0)
    """The requests of the last days, as the ledger's sums were at the last use or recount."""


class ServerMemory(Base):
    """The memory map that a server reported last."""

    __tablename__ = "server_memories"

    server_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    seen_at: Mapped[datetime] = mapped_column(UtcDateTime)
    content: Mapped[JsonObject] = mapped_column(JSON)
    """In the format of the service that writes it."""
