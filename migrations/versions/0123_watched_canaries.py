"""Limits of canaries, the reason of a rollback, and the sums that are compared."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraplex.migrations.initial.columns import ID, NAME, tenant_id

revision = "0123"
down_revision = "0122"
branch_labels = None
depends_on = None

_LIMITED = ("adapter_aliases", "adapter_alias_changes")


def upgrade() -> None:
    """Go forward."""
    for table in _LIMITED:
        op.add_column(table, sa.Column("canary_limits", sa.JSON(none_as_null=True)))
    op.add_column("adapter_alias_changes", sa.Column("reason", sa.Text()))
    op.create_table(
        "canary_counts",
        tenant_id(primary_key=True),
        sa.Column("adapter_id", ID, primary_key=True),
        sa.Column("alias", NAME, primary_key=True),
        sa.Column("change_number", sa.Integer(), primary_key=True),
        sa.Column("is_canary", sa.Boolean(), primary_key=True),
        *(_count(name) for name in ("requests", "errors", "answers", "refusals")),
        *(column for figure in ("length", "time") for column in _log_sums(figure)),
    )
    if op.get_bind().dialect.name == "postgresql":
        _secure_rows()


def downgrade() -> None:
    """Go back. Canaries stay, and are not watched."""
    op.drop_table("canary_counts")
    op.drop_column("adapter_alias_changes", "reason")
    for table in reversed(_LIMITED):
        op.drop_column(table, "canary_limits")


def _count(name: str) -> sa.Column[int]:
    return sa.Column(f"num_{name}", sa.BigInteger(), nullable=False)


def _log_sums(figure: str) -> list[sa.Column[int] | sa.Column[float]]:
    return [
        _count(f"{figure}s"),
        sa.Column(f"log_{figure}_sum", sa.Float(), nullable=False),
        sa.Column(f"log_{figure}_squares", sa.Float(), nullable=False),
    ]


def _secure_rows() -> None:
    """Let a tenant's transaction see and write its own rows only, as in the first revision."""
    own = "tenant_id = (SELECT current_setting('app.tenant', true))"
    op.execute("ALTER TABLE canary_counts ENABLE ROW LEVEL SECURITY")
    op.execute(
        f"CREATE POLICY tenant ON canary_counts TO loraplex_tenant USING ({own}) WITH CHECK ({own})"
    )
    op.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON canary_counts TO loraplex_tenant")
