"""How many sequences met their service level objectives, in the figures of the overview."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0143"
down_revision = "0141"
branch_labels = None
depends_on = None

_TABLES = ("server_samples", "tenant_samples")
_NUMBERS = ("num_judged", "num_met")


def upgrade() -> None:
    """Go forward: of time steps before, nothing is known."""
    for table in _TABLES:
        for name in _NUMBERS:
            column = sa.Column(name, sa.BigInteger(), nullable=False, server_default=sa.text("0"))
            op.add_column(table, column)
        op.add_column(table, sa.Column("objective_counts", sa.JSON()))


def downgrade() -> None:
    """Go back."""
    for table in _TABLES:
        for name in ("objective_counts", *_NUMBERS):
            op.drop_column(table, name)
