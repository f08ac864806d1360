"""Tenants, users and operators, their keys, and how they sign in."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.schema import SchemaItem

from .columns import ID, KEY_ID, MOMENT, one_of, tenant_id


def create_tables() -> None:
    """Create the tables, each after those that it refers to."""
    _create_tenants()
    _create_operators()
    _create_api_keys()
    _create_accounts()


def _create_tenants() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", ID, primary_key=True),
        sa.Column("slug", sa.String(63), nullable=False, unique=True),
        sa.Column("name", sa.String(200)),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("suspended_at", MOMENT),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.CheckConstraint("weight > 0", name="weight"),
    )
    op.create_table(
        "users",
        tenant_id(),
        sa.Column("id", ID, primary_key=True),
        sa.Column("email", sa.String(254), nullable=False),
        one_of("role", "owner", "developer", "viewer"),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("disabled_at", MOMENT),
        sa.UniqueConstraint("tenant_id", "id"),
        sa.UniqueConstraint("tenant_id", "email"),
    )


def _create_operators() -> None:
    op.create_table(
        "operators",
        sa.Column("id", ID, primary_key=True),
        sa.Column("name", sa.String(64), nullable=False, unique=True),
        one_of("role", "admin", "viewer"),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("disabled_at", MOMENT),
    )
    op.create_table(
        "operator_keys",
        *_stored_key(),
        sa.Column("operator_id", ID, sa.ForeignKey("operators.id"), nullable=False),
    )


def _create_api_keys() -> None:
    op.create_table(
        "api_keys",
        tenant_id(),
        *_stored_key(),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("user_id", ID),
        sa.Column("adapters", sa.JSON()),
        sa.Column("successor_id", KEY_ID),
        sa.Column("created_by", sa.String(64), nullable=False),
        sa.UniqueConstraint("tenant_id", "id"),
        sa.ForeignKeyConstraint(["tenant_id", "user_id"], ["users.tenant_id", "users.id"]),
        sa.ForeignKeyConstraint(
            ["tenant_id", "successor_id"], ["api_keys.tenant_id", "api_keys.id"]
        ),
    )


def _stored_key() -> tuple[SchemaItem, ...]:
    return (
        sa.Column("id", KEY_ID, primary_key=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("mac", sa.LargeBinary(32), nullable=False),
        sa.Column("secret_id", sa.String(8), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("expires_at", MOMENT),
        sa.Column("revoked_at", MOMENT),
        sa.Column("last_used_at", MOMENT),
        sa.Column("networks", sa.JSON()),
    )


def _create_accounts() -> None:
    op.create_table(
        "accounts",
        tenant_id(nullable=True),
        sa.Column("id", ID, primary_key=True),
        one_of("kind", "operator", "user"),
        sa.Column("password_hash", sa.String(256)),
        sa.Column("password_set_at", MOMENT),
        sa.Column("invitation_hash", sa.String(64), unique=True),
        sa.Column("invitation_expires_at", MOMENT),
    )
    op.create_table(
        "account_sessions",
        tenant_id(nullable=True),
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("account_id", ID, sa.ForeignKey("accounts.id"), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("seen_at", MOMENT, nullable=False),
        sa.Column("expires_at", MOMENT, nullable=False),
        sa.Column("confirmed_until", MOMENT),
        sa.Index(None, "account_id"),
        sa.Index(None, "expires_at"),
    )
    op.create_table(
        "sign_in_failures",
        sa.Column("subject", sa.String(64), primary_key=True),
        sa.Column("num_failures", sa.Integer(), nullable=False),
        sa.Column("began_at", MOMENT, nullable=False),
        sa.Column("locked_until", MOMENT),
    )
