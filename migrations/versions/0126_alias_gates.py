"""Gates of aliases, and what let an alias move."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraplex.migrations.initial.columns import AUTHOR, ID, MOMENT, NAME, tenant_id

revision = "0126"
down_revision = "0125"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.create_table(
        "alias_gates",
        sa.Column("id", ID, primary_key=True),
        tenant_id(),
        sa.Column("adapter_name", NAME, nullable=False),
        sa.Column("alias", NAME, nullable=False),
        sa.Column("golden_set_name", NAME, nullable=False),
        sa.Column("tolerance", sa.Float()),
        sa.Column("created_by", AUTHOR, nullable=False),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.UniqueConstraint("tenant_id", "adapter_name", "alias"),
    )
    op.add_column("adapter_alias_changes", sa.Column("evaluation_id", sa.String(40)))
    op.add_column("adapter_alias_changes", sa.Column("override_reason", sa.Text()))
    if op.get_bind().dialect.name == "postgresql":
        _secure_rows()


def downgrade() -> None:
    """Go back."""
    op.drop_column("adapter_alias_changes", "override_reason")
    op.drop_column("adapter_alias_changes", "evaluation_id")
    op.drop_table("alias_gates")


def _secure_rows() -> None:
    """Let a tenant's transaction see and write its own rows only, as in the first revision."""
    own = "tenant_id = (SELECT current_setting('app.tenant', true))"
    op.execute("ALTER TABLE alias_gates ENABLE ROW LEVEL SECURITY")
    op.execute(
        f"CREATE POLICY tenant ON alias_gates TO loraplex_tenant USING ({own}) WITH CHECK ({own})"
    )
    op.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON alias_gates TO loraplex_tenant")
