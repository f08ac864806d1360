"""A limit on the tokens that fine-tuning jobs train on, and their price."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0124"
down_revision = "0123"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward: without a limit, and for nothing."""
    op.add_column("quotas", sa.Column("trained_tokens_per_period", sa.BigInteger()))
    op.add_column("prices", _price("trained"))
    op.add_column("tuning_jobs", _price("token_price"))


def downgrade() -> None:
    """Go back."""
    op.drop_column("tuning_jobs", "token_price")
    op.drop_column("prices", "trained")
    op.drop_column("quotas", "trained_tokens_per_period")


def _price(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False, server_default=sa.text("0"))
