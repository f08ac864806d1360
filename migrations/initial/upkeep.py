"""The audit logs, who serves and who does which upkeep, and kept answers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.schema import SchemaItem

from .columns import ID, MOMENT, REQUEST_ID, one_of, tenant_id


def create_tables() -> None:
    """Create the tables, each after those that it refers to."""
    _create_audit_logs()
    _create_servers()
    _create_idempotent_answers()


def _create_audit_logs() -> None:
    op.create_table(
        "audit_entries",
        tenant_id(primary_key=True),
        sa.Column("number", sa.BigInteger(), primary_key=True, autoincrement=False),
        *_audit_entry(),
    )
    op.create_table("audit_heads", tenant_id(primary_key=True), *_audit_head())
    op.create_table(
        "platform_audit_entries",
        sa.Column("number", sa.BigInteger(), primary_key=True, autoincrement=False),
        *_audit_entry(),
    )
    op.create_table(
        "platform_audit_heads",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        *_audit_head(),
    )


def _audit_entry() -> tuple[SchemaItem, ...]:
    return (
        sa.Column("at", MOMENT, nullable=False),
        one_of("actor_kind", "operator", "user", "key", "system"),
        sa.Column("actor_id", ID, nullable=False),
        sa.Column("actor_name", sa.String(254), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("resource", sa.String(255), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("request_id", REQUEST_ID),
        sa.Column("address", sa.String(45)),
        sa.Column("previous_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("hash", sa.LargeBinary(32), nullable=False),
        sa.Column("secret_id", sa.String(8), nullable=False),
        sa.Index(None, "request_id"),
    )


def _audit_head() -> tuple[SchemaItem, ...]:
    return (
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("hash", sa.LargeBinary(32), nullable=False),
    )


def _create_servers() -> None:
    op.create_table(
        "servers",
        sa.Column("id", ID, primary_key=True),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("version", sa.String(32), nullable=False),
        sa.Column("base_id", sa.String(128), nullable=False),
        sa.Column("started_at", MOMENT, nullable=False),
        sa.Column("seen_at", MOMENT, nullable=False),
        sa.Column("stopped_at", MOMENT),
        sa.Column("evicted_at", MOMENT),
    )
    op.create_table(
        "replicas",
        sa.Column("id", ID, primary_key=True),
        sa.Column("address", sa.String(300), nullable=False, unique=True),
        sa.Column("is_draining", sa.Boolean(), nullable=False),
        sa.Column("added_at", MOMENT, nullable=False),
        sa.Column("incarnation", sa.String(64)),
        sa.Column("base_id", sa.String(128)),
        sa.Column("runtime_id", sa.String(128)),
        sa.Column("state", sa.String(16)),
        sa.Column("figures", sa.JSON()),
        sa.Column("seen_at", MOMENT),
    )
    op.create_table(
        "server_memories",
        sa.Column("server_id", ID, primary_key=True),
        sa.Column("seen_at", MOMENT, nullable=False),
        sa.Column("content", sa.JSON(), nullable=False),
    )
    op.create_table(
        "job_leases",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("server_id", ID),
        sa.Column("expires_at", MOMENT),
        sa.Column("finished_at", MOMENT),
    )


def _create_idempotent_answers() -> None:
    op.create_table(
        "idempotent_answers",
        sa.Column("owner", sa.String(64), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("request_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("request_id", REQUEST_ID, nullable=False),
        sa.Column("server_id", ID, nullable=False),
        sa.Column("status", sa.Integer()),
        sa.Column("answer", sa.LargeBinary()),
        sa.Column("created_at", MOMENT, nullable=False, index=True),
    )
