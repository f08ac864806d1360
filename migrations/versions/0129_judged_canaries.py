"""The sums of a judge's comparisons of canaries."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0129"
down_revision = "0126"
branch_labels = None
depends_on = None

_NONE_YET = sa.text("0")
_LIMITED = ("adapter_aliases", "adapter_alias_changes")


def upgrade() -> None:
    """Go forward."""
    for name, kind in (
        ("num_judged", sa.BigInteger()),
        ("score_sum", sa.Float()),
        ("score_squares", sa.Float()),
    ):
        column = sa.Column(name, kind, nullable=False, server_default=_NONE_YET)
        op.add_column("canary_counts", column)


def downgrade() -> None:
    """Go back. Canaries and their other limits stay, and nothing is judged."""
    is_postgres = op.get_bind().dialect.name == "postgresql"
    others = (
        "(canary_limits::jsonb - 'judge' - 'judge_model' - 'judge_percent')::json"
        if is_postgres
        else "json_remove(canary_limits, '$.judge', '$.judge_model', '$.judge_percent')"
    )
    for table in _LIMITED:
        op.execute(f"UPDATE {table} SET canary_limits = {others} WHERE canary_limits IS NOT NULL")
    for name in ("score_squares", "score_sum", "num_judged"):
        op.drop_column("canary_counts", name)
