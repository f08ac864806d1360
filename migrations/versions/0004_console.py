"""Signing in, figures over time, and where things lie: what the console shows."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)
TENANT_TABLES = ("account_sessions", "accounts", "adapter_uses", "tenant_samples")


def upgrade() -> None:
    """Go forward."""
    _create_accounts()
    _create_samples()
    _create_uses()
    _create_memories()
    if op.get_bind().dialect.name == "postgresql":
        _secure_rows()


def downgrade() -> None:
    """Go back. Passwords, sessions and figures are lost; keys and the ledger stay."""
    for name in (
        "server_memories",
        "adapter_uses",
        "tenant_samples",
        "server_samples",
        "sign_in_failures",
        "account_sessions",
        "accounts",
    ):
        op.drop_table(name)


def _secure_rows() -> None:
    """As in the revision before: a tenant's role has its tenant's rows, operators' are nobody's."""
    own = "tenant_id = (SELECT current_setting('app.tenant', true))"
    for table in TENANT_TABLES:
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(
            f"CREATE POLICY tenant ON {table} TO loraplex_tenant USING ({own}) WITH CHECK ({own})"
        )
        op.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO loraplex_tenant")


def _create_accounts() -> None:
    op.create_table(
        "accounts",
        sa.Column("tenant_id", sa.String(36), nullable=True),
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column(
            "kind",
            sa.Enum(
                "operator",
                "user",
                name="kind",
                native_enum=False,
                create_constraint=True,
                length=16,
            ),
            nullable=False,
        ),
        sa.Column("password_hash", sa.String(256), nullable=True),
        sa.Column("password_set_at", MOMENT, nullable=True),
        sa.Column("invitation_hash", sa.String(64), nullable=True),
        sa.Column("invitation_expires_at", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_accounts_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_accounts")),
        sa.UniqueConstraint("invitation_hash", name=op.f("uq_accounts_invitation_hash")),
    )
    op.create_table(
        "account_sessions",
        sa.Column("tenant_id", sa.String(36), nullable=True),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("account_id", sa.String(36), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("seen_at", MOMENT, nullable=False),
        sa.Column("expires_at", MOMENT, nullable=False),
        sa.Column("confirmed_until", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_account_sessions_tenant_id_tenants")
        ),
        sa.ForeignKeyConstraint(
            ["account_id"], ["accounts.id"], name=op.f("fk_account_sessions_account_id_accounts")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_account_sessions")),
    )
    op.create_index("ix_account_sessions_account_id", "account_sessions", ["account_id"])
    op.create_index("ix_account_sessions_expires_at", "account_sessions", ["expires_at"])
    op.create_table(
        "sign_in_failures",
        sa.Column("subject", sa.String(64), nullable=False),
        sa.Column("num_failures", sa.Integer(), nullable=False),
        sa.Column("began_at", MOMENT, nullable=False),
        sa.Column("locked_until", MOMENT, nullable=True),
        sa.PrimaryKeyConstraint("subject", name=op.f("pk_sign_in_failures")),
    )


def _figures() -> list[sa.Column[Any]]:
    return [
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in (
                "num_requests",
                "num_errors",
                "prompt_tokens",
                "output_tokens",
                "num_cold_loads",
            )
        ),
        *(
            sa.Column(name, sa.Float(), nullable=False)
            for name in (
                "running_seconds",
                "waiting_seconds",
                "kv_block_seconds",
                "adapter_byte_seconds",
            )
        ),
        sa.Column("first_token_counts", sa.JSON(), nullable=False),
        sa.Column("token_gap_counts", sa.JSON(), nullable=False),
    ]


def _create_samples() -> None:
    op.create_table(
        "server_samples",
        sa.Column("server_id", sa.String(36), nullable=False),
        sa.Column("step_seconds", sa.Integer(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("kv_capacity_seconds", sa.Float(), nullable=False),
        *_figures(),
        sa.PrimaryKeyConstraint("server_id", "step_seconds", "at", name=op.f("pk_server_samples")),
    )
    op.create_index("ix_server_samples_step_seconds_at", "server_samples", ["step_seconds", "at"])
    op.create_table(
        "tenant_samples",
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("server_id", sa.String(36), nullable=False),
        sa.Column("step_seconds", sa.Integer(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        *_figures(),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_tenant_samples_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint(
            "tenant_id", "server_id", "step_seconds", "at", name=op.f("pk_tenant_samples")
        ),
    )
    op.create_index("ix_tenant_samples_step_seconds_at", "tenant_samples", ["step_seconds", "at"])


def _create_uses() -> None:
    op.create_table(
        "adapter_uses",
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("adapter_name", sa.String(64), nullable=False),
        sa.Column("last_used_at", MOMENT, nullable=False),
        sa.Column("latency_counts", sa.JSON(), nullable=False),
        sa.Column("p95_ms", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_adapter_uses_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "adapter_name", name=op.f("pk_adapter_uses")),
    )


def _create_memories() -> None:
    op.create_table(
        "server_memories",
        sa.Column("server_id", sa.String(36), nullable=False),
        sa.Column("seen_at", MOMENT, nullable=False),
        sa.Column("content", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("server_id", name=op.f("pk_server_memories")),
    )
