"""What requests have used of the engine, and what that costs the operator."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0139"
down_revision = "0138"
branch_labels = None
depends_on = None

_TABLES = ("usage_records", "usage_days")
_COLUMNS = ("step_nanoseconds", "kv_byte_seconds", "loaded_bytes", "fetched_bytes", "cost")


def upgrade() -> None:
    """Go forward: of earlier requests, nothing of it is known."""
    for table in _TABLES:
        for name in _COLUMNS:
            zero = sa.text("0")
            op.add_column(
                table, sa.Column(name, sa.BigInteger(), nullable=False, server_default=zero)
            )


def downgrade() -> None:
    """Go back."""
    for table in _TABLES:
        for name in reversed(_COLUMNS):
            op.drop_column(table, name)
