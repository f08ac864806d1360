"""Who created a fine-tuning job, and what the jobs of each user and key trained on by day."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraplex.migrations.initial.columns import ID, KEY_ID, tenant_id

revision = "0141"
down_revision = "0140"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward: jobs that exist already are charged to their tenant's budgets only."""
    op.add_column("tuning_jobs", sa.Column("user_id", ID))
    op.add_column("tuning_jobs", sa.Column("key_id", KEY_ID))
    op.create_table(
        "training_days",
        tenant_id(primary_key=True),
        sa.Column("day", sa.Date(), primary_key=True),
        sa.Column("user_id", ID, primary_key=True),
        sa.Column("key_id", KEY_ID, primary_key=True),
        sa.Column("trained_tokens", sa.BigInteger(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
    )
    if op.get_bind().dialect.name == "postgresql":
        _secure_rows()


def downgrade() -> None:
    """Go back. The sums by user and key are lost; those by adapter stay."""
    op.drop_table("training_days")
    op.drop_column("tuning_jobs", "key_id")
    op.drop_column("tuning_jobs", "user_id")


def _secure_rows() -> None:
    """Let a tenant's transaction see and write its own rows only, as in the first revision."""
    own = "tenant_id = (SELECT current_setting('app.tenant', true))"
    op.execute("ALTER TABLE training_days ENABLE ROW LEVEL SECURITY")
    op.execute(
        f"CREATE POLICY tenant ON training_days TO loraplex_tenant USING ({own}) WITH CHECK ({own})"
    )
    op.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON training_days TO loraplex_tenant")
