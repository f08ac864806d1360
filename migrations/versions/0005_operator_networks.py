"""From which networks an operator's key may be used."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward: the keys that there are may be used from anywhere."""
    op.add_column("operator_keys", sa.Column("networks", sa.JSON(), nullable=True))


def downgrade() -> None:
    """Go back. A key that was restricted to networks ends: without them it would gain."""
    keys = sa.table(
        "operator_keys",
        sa.column("networks", sa.JSON(none_as_null=True)),
        sa.column("created_at", sa.DateTime(timezone=True)),
        sa.column("revoked_at", sa.DateTime(timezone=True)),
    )
    restricted = keys.update().where(keys.c.networks.is_not(None), keys.c.revoked_at.is_(None))
    op.execute(restricted.values(revoked_at=keys.c.created_at))
    with op.batch_alter_table("operator_keys") as table:
        table.drop_column("networks")
