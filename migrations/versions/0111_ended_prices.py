"""Rows that end a tenant's own prices."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0111"
down_revision = "0106"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.add_column(
        "prices", sa.Column("is_end", sa.Boolean(), nullable=False, server_default=sa.false())
    )


def downgrade() -> None:
    """Go back: own prices that ended hold again, since an end would be read as a price of 0."""
    op.execute("DELETE FROM prices WHERE is_end")
    op.drop_column("prices", "is_end")
