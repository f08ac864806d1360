"""Targets of tenants for TTFT and ITL."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0134"
down_revision = "0129"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.add_column("tenants", sa.Column("target_ttft_ms", sa.Double()))
    op.add_column("tenants", sa.Column("target_itl_ms", sa.Double()))


def downgrade() -> None:
    """Go back."""
    op.drop_column("tenants", "target_itl_ms")
    op.drop_column("tenants", "target_ttft_ms")
