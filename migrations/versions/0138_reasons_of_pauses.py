"""Why a fine-tuning job is paused."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0138"
down_revision = "0134"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward: of jobs that are paused already, the reason is unknown."""
    op.add_column("tuning_jobs", sa.Column("pause_reason", sa.String(16)))


def downgrade() -> None:
    """Go back."""
    op.drop_column("tuning_jobs", "pause_reason")
