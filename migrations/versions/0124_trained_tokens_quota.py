"""A limit on the tokens that a tenant's fine-tuning jobs train on in a day or month."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0124"
down_revision = "0117"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.add_column("quotas", sa.Column("trained_tokens_per_period", sa.BigInteger()))


def downgrade() -> None:
    """Go back: jobs have no limit again."""
    op.drop_column("quotas", "trained_tokens_per_period")
