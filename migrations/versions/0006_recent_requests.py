"""The requests of an adapter's last days beside its use, and the index that counts them."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

COUNTED_DAYS = 30


def upgrade() -> None:
    """Go forward: the uses that there are get the ledger's sums."""
    columns = ["tenant_id", "adapter_name", "day"]
    op.create_index("ix_usage_days_tenant_id_adapter_name_day", "usage_days", columns)
    counted = sa.Column("num_requests", sa.BigInteger(), nullable=False, server_default="0")
    op.add_column("adapter_uses", counted)
    op.execute(_fill(datetime.now(UTC).date() - timedelta(days=COUNTED_DAYS - 1)))
    with op.batch_alter_table("adapter_uses") as table:
        table.alter_column("num_requests", server_default=None)


def downgrade() -> None:
    """Go back. The ledger has the sums."""
    op.drop_index("ix_usage_days_tenant_id_adapter_name_day", "usage_days")
    with op.batch_alter_table("adapter_uses") as table:
        table.drop_column("num_requests")


def _fill(first_day: date) -> sa.Update:
    names = ("tenant_id", "adapter_name", "num_requests")
    uses = sa.table("adapter_uses", *map(sa.column, names))
    days = sa.table("usage_days", *map(sa.column, names), sa.column("day", sa.Date()))
    total = (
        sa.select(sa.func.coalesce(sa.func.sum(days.c.num_requests), 0))
        .where(
            days.c.tenant_id == uses.c.tenant_id,
            days.c.adapter_name == uses.c.adapter_name,
            days.c.day >= first_day,
        )
        .scalar_subquery()
    )
    return uses.update().values(num_requests=total)
