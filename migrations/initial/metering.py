"""Quotas, the usage ledger, the request log, and figures over time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.schema import SchemaItem

from .columns import DIGEST, ID, KEY_ID, MOMENT, NAME, REQUEST_ID, one_of, tenant_id


def create_tables() -> None:
    """Create the tables, each after those that it refers to."""
    _create_quotas()
    _create_usage()
    _create_request_log()
    _create_overview()


def _create_quotas() -> None:
    op.create_table(
        "quotas",
        tenant_id(primary_key=True),
        sa.Column("requests_per_minute", sa.Integer()),
        sa.Column("input_tokens_per_minute", sa.Integer()),
        sa.Column("output_tokens_per_minute", sa.Integer()),
        sa.Column("concurrent_requests", sa.Integer()),
        sa.Column("tokens_per_period", sa.BigInteger()),
        one_of("period", "day", "month"),
        sa.Column("adapters", sa.Integer()),
        sa.Column("versions_per_adapter", sa.Integer()),
        sa.Column("stored_bytes", sa.BigInteger()),
        sa.Column("keys", sa.Integer()),
        sa.Column("users", sa.Integer()),
        sa.Column("updated_at", MOMENT, nullable=False),
    )
    op.create_table(
        "rate_buckets",
        tenant_id(primary_key=True),
        one_of("kind", "requests", "input_tokens", "output_tokens", primary_key=True),
        sa.Column("level", sa.Double(), nullable=False),
        sa.Column("clock", sa.String(64), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
    )
    op.create_table(
        "period_uses",
        tenant_id(primary_key=True),
        one_of("period", "day", "month", primary_key=True),
        sa.Column("begins_at", MOMENT, primary_key=True),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "reservations",
        tenant_id(),
        sa.Column("request_id", REQUEST_ID, primary_key=True),
        sa.Column("server_id", ID, nullable=False),
        sa.Column("key_id", KEY_ID),
        sa.Column("adapter_name", NAME),
        sa.Column("adapter_version", sa.Integer()),
        sa.Column("adapter_digest", DIGEST),
        sa.Column("input_tokens", sa.Integer(), nullable=False),
        sa.Column("output_tokens", sa.Integer(), nullable=False),
        sa.Column("paid_input_tokens", sa.Integer(), nullable=False),
        sa.Column("paid_output_tokens", sa.Integer(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("clock", sa.String(64), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.CheckConstraint("input_tokens >= 0 AND output_tokens >= 0", name="tokens"),
        sa.Index(None, "tenant_id"),
        sa.Index(None, "server_id"),
    )


def _create_usage() -> None:
    op.create_table(
        "usage_records",
        tenant_id(),
        sa.Column("request_id", REQUEST_ID, primary_key=True),
        sa.Column("adapter_name", NAME),
        sa.Column("adapter_version", sa.Integer()),
        sa.Column("adapter_digest", DIGEST),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("tier", sa.String(16)),
        sa.Column("finish_reason", sa.String(32), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("key_id", KEY_ID),
        sa.Column("load_ms", sa.Double()),
        sa.CheckConstraint(
            "prompt_tokens >= 0 AND completion_tokens >= 0"
            " AND cached_tokens >= 0 AND cached_tokens <= prompt_tokens",
            name="tokens",
        ),
        sa.Index(None, "tenant_id", "created_at"),
    )
    op.create_table(
        "usage_days",
        tenant_id(primary_key=True),
        sa.Column("day", sa.Date(), primary_key=True),
        sa.Column("adapter_name", NAME, primary_key=True),
        sa.Column("adapter_version", sa.Integer(), primary_key=True),
        sa.Column("num_requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_cold_loads", sa.BigInteger(), nullable=False),
        sa.Column("residency_byte_seconds", sa.BigInteger(), nullable=False),
        sa.Index(None, "tenant_id", "adapter_name", "day"),
    )


def _create_request_log() -> None:
    op.create_table(
        "request_log",
        tenant_id(),
        sa.Column("request_id", REQUEST_ID, primary_key=True),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("key_id", KEY_ID),
        sa.Column("route", sa.String(64), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("error_code", sa.String(64)),
        sa.Column("model", sa.String(200)),
        sa.Column("adapter_name", NAME),
        sa.Column("adapter_version", sa.Integer()),
        sa.Column("finish_reason", sa.String(32)),
        sa.Column("tier", sa.String(16)),
        sa.Column("prompt_tokens", sa.Integer()),
        sa.Column("cached_tokens", sa.Integer()),
        sa.Column("completion_tokens", sa.Integer()),
        sa.Column("queue_ms", sa.Double()),
        sa.Column("adapter_wait_ms", sa.Double()),
        sa.Column("load_ms", sa.Double()),
        sa.Column("first_token_ms", sa.Double()),
        sa.Column("total_ms", sa.Double(), nullable=False),
        sa.Index(None, "tenant_id", "created_at", "request_id"),
        sa.Index(None, "created_at"),
    )


def _create_overview() -> None:
    op.create_table(
        "server_samples",
        *_sample_key(),
        sa.Column("kv_capacity_seconds", sa.Float(), nullable=False),
        *_figures(),
    )
    op.create_table("tenant_samples", tenant_id(primary_key=True), *_sample_key(), *_figures())
    op.create_table(
        "adapter_uses",
        tenant_id(primary_key=True),
        sa.Column("adapter_name", NAME, primary_key=True),
        sa.Column("last_used_at", MOMENT, nullable=False),
        sa.Column("latency_counts", sa.JSON(), nullable=False),
        sa.Column("p95_ms", sa.Float(), nullable=False),
        sa.Column("num_requests", sa.BigInteger(), nullable=False),
    )


def _sample_key() -> tuple[SchemaItem, ...]:
    return (
        sa.Column("server_id", ID, primary_key=True),
        sa.Column("step_seconds", sa.Integer(), primary_key=True),
        sa.Column("at", sa.BigInteger(), primary_key=True),
        sa.Index(None, "step_seconds", "at"),
    )


def _figures() -> tuple[SchemaItem, ...]:
    return (
        sa.Column("num_requests", sa.BigInteger(), nullable=False),
        sa.Column("num_errors", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_cold_loads", sa.BigInteger(), nullable=False),
        sa.Column("running_seconds", sa.Float(), nullable=False),
        sa.Column("waiting_seconds", sa.Float(), nullable=False),
        sa.Column("kv_block_seconds", sa.Float(), nullable=False),
        sa.Column("adapter_byte_seconds", sa.Float(), nullable=False),
        sa.Column("first_token_counts", sa.JSON(), nullable=False),
        sa.Column("token_gap_counts", sa.JSON(), nullable=False),
    )
