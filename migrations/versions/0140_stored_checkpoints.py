"""Checkpoints of fine-tuning jobs in the object store."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraplex.migrations.initial.columns import MOMENT, tenant_id

revision = "0140"
down_revision = "0139"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.create_table(
        "stored_checkpoints",
        sa.Column("id", sa.String(40), primary_key=True),
        tenant_id(),
        sa.Column("job_id", sa.String(40), sa.ForeignKey("tuning_jobs.id"), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("runtime_id", sa.String(71), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Index("ix_stored_checkpoints_job_id_step", "job_id", "step"),
    )
    if op.get_bind().dialect.name == "postgresql":
        _secure_rows()


def downgrade() -> None:
    """Go back. A garbage collection removes the objects."""
    op.drop_table("stored_checkpoints")


def _secure_rows() -> None:
    """Let a tenant's transaction see and write its own rows only, as in the first revision."""
    own = "tenant_id = (SELECT current_setting('app.tenant', true))"
    op.execute("ALTER TABLE stored_checkpoints ENABLE ROW LEVEL SECURITY")
    op.execute(
        "CREATE POLICY tenant ON stored_checkpoints TO loraplex_tenant"
        f" USING ({own}) WITH CHECK ({own})"
    )
    op.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON stored_checkpoints TO loraplex_tenant")
