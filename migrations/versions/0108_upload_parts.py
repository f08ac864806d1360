"""The parts of uploads in the store."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0108"
down_revision: str | None = "0107"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward. The bytes of unfinished uploads stay on the disks of their servers."""
    op.add_column("uploads", sa.Column("parts", sa.JSON(none_as_null=True)))


def downgrade() -> None:
    """Go back. Unfinished uploads whose bytes are in the store have to be declared again."""
    op.drop_column("uploads", "parts")
