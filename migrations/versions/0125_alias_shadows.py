"""Shadows of aliases, with the sums of their comparisons."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraplex.migrations.initial.columns import AUTHOR, ID, MOMENT, NAME, tenant_id

revision = "0125"
down_revision = "0124"
branch_labels = None
depends_on = None

_SUMS = {"rouge_sum": sa.Float(), "log_length_sum": sa.Float()}
_COUNTS = ("num_compared", "num_errors", "num_equal")


def upgrade() -> None:
    """Go forward."""
    op.create_table(
        "alias_shadows",
        tenant_id(primary_key=True),
        sa.Column("adapter_id", ID, primary_key=True),
        sa.Column("alias", NAME, primary_key=True),
        sa.Column("version_number", sa.Integer(), nullable=False),
        sa.Column("percent", sa.Float(), nullable=False),
        sa.Column("set_by", AUTHOR),
        sa.Column("change_number", sa.Integer(), nullable=False),
        sa.Column("since", MOMENT, nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _COUNTS),
        *(sa.Column(name, kind, nullable=False) for name, kind in _SUMS.items()),
        sa.Column("rouge_counts", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "version_number"],
            [
                "adapter_versions.tenant_id",
                "adapter_versions.adapter_id",
                "adapter_versions.number",
            ],
            name="fk_alias_shadows_version_number_adapter_versions",
        ),
        sa.CheckConstraint("percent > 0 AND percent <= 100", name=op.f("ck_alias_shadows_percent")),
    )
    if op.get_bind().dialect.name == "postgresql":
        _secure_rows()


def downgrade() -> None:
    """Go back. Shadows end."""
    op.drop_table("alias_shadows")


def _secure_rows() -> None:
    """Let a tenant's transaction see and write its own rows only, as in the first revision."""
    own = "tenant_id = (SELECT current_setting('app.tenant', true))"
    op.execute("ALTER TABLE alias_shadows ENABLE ROW LEVEL SECURITY")
    op.execute(
        f"CREATE POLICY tenant ON alias_shadows TO loraplex_tenant USING ({own}) WITH CHECK ({own})"
    )
    op.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON alias_shadows TO loraplex_tenant")
