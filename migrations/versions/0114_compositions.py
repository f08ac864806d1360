"""The compositions of requests in the ledger."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0114"
down_revision: str | None = "0112"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.add_column("usage_records", sa.Column("composition", sa.String(640)))


def downgrade() -> None:
    """Go back. Rows of compositions keep the adapter that was named first."""
    op.drop_column("usage_records", "composition")
