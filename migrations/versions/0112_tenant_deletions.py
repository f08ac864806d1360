"""Deletions of tenants."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraplex.migrations.initial.columns import ID, MOMENT

revision = "0112"
down_revision = "0111"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.add_column("tenants", sa.Column("deleting_at", MOMENT))
    op.create_table(
        "tenant_deletions",
        sa.Column("id", ID, sa.ForeignKey("tenants.id"), primary_key=True),
        sa.Column("slug", sa.String(63), nullable=False),
        sa.Column("with_usage", sa.Boolean(), nullable=False),
        sa.Column("requested_at", MOMENT, nullable=False),
        sa.Column("finished_at", MOMENT),
        sa.Column("receipt", sa.JSON(), nullable=False),
        sa.Index("ix_tenant_deletions_finished_at", "finished_at"),
    )


def downgrade() -> None:
    """Go back."""
    op.drop_table("tenant_deletions")
    op.drop_column("tenants", "deleting_at")
