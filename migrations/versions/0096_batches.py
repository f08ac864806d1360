"""Batches, the results of their lines, and files."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraplex.migrations.initial.columns import KEY_ID, MOMENT, one_of, tenant_id

revision = "0096"
down_revision = "0001"
branch_labels = None
depends_on = None

TABLES = ("files", "batches", "batch_results")
"""Each after those that it refers to."""

_LONG_ID = sa.String(40)


def upgrade() -> None:
    """Go forward."""
    op.create_table(
        "files",
        sa.Column("id", _LONG_ID, primary_key=True),
        tenant_id(),
        sa.Column("key_id", KEY_ID),
        one_of("purpose", "batch", "batch_output"),
        sa.Column("filename", sa.String(255), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("expires_at", MOMENT, nullable=False),
        sa.Index("ix_files_tenant_id_created_at_id", "tenant_id", "created_at", "id"),
        sa.Index("ix_files_expires_at", "expires_at"),
    )
    op.create_table(
        "batches",
        sa.Column("id", _LONG_ID, primary_key=True),
        tenant_id(),
        sa.Column("key_id", KEY_ID, nullable=False),
        sa.Column("address", sa.String(45)),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("input_file_id", _LONG_ID, nullable=False),
        one_of(
            "state",
            *("validating", "in_progress", "finalizing", "cancelling"),
            *("completed", "failed", "expired", "cancelled"),
        ),
        sa.Column("labels", sa.JSON()),
        sa.Column("errors", sa.JSON()),
        sa.Column("num_lines", sa.Integer(), nullable=False),
        sa.Column("num_completed", sa.Integer(), nullable=False),
        sa.Column("num_failed", sa.Integer(), nullable=False),
        sa.Column("output_file_id", _LONG_ID),
        sa.Column("error_file_id", _LONG_ID),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("expires_at", MOMENT, nullable=False),
        sa.Column("in_progress_at", MOMENT),
        sa.Column("finalizing_at", MOMENT),
        sa.Column("cancelling_at", MOMENT),
        sa.Column("ended_at", MOMENT),
        sa.Index("ix_batches_tenant_id_created_at_id", "tenant_id", "created_at", "id"),
        sa.Index("ix_batches_state", "state"),
    )
    op.create_table(
        "batch_results",
        tenant_id(),
        sa.Column("batch_id", _LONG_ID, sa.ForeignKey("batches.id"), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("is_success", sa.Boolean(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
    )
    if op.get_bind().dialect.name == "postgresql":
        _secure_rows()


def downgrade() -> None:
    """Go back."""
    for table in reversed(TABLES):
        op.drop_table(table)


def _secure_rows() -> None:
    """Let a tenant's transaction see and write its own rows only, as in the first revision."""
    own = "tenant_id = (SELECT current_setting('app.tenant', true))"
    for table in TABLES:
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(
            f"CREATE POLICY tenant ON {table} TO loraplex_tenant USING ({own}) WITH CHECK ({own})"
        )
        op.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO loraplex_tenant")
