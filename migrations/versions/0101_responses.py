"""Stored responses."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraplex.migrations.initial.columns import KEY_ID, MOMENT, tenant_id

revision = "0101"
down_revision = "0096"
branch_labels = None
depends_on = None

_LONG_ID = sa.String(40)


def upgrade() -> None:
    """Go forward."""
    op.create_table(
        "responses",
        sa.Column("id", _LONG_ID, primary_key=True),
        tenant_id(),
        sa.Column("key_id", KEY_ID),
        sa.Column("previous_id", _LONG_ID),
        sa.Column("size_bytes", sa.Integer(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("expires_at", MOMENT, nullable=False),
        sa.Column("input", sa.LargeBinary(), nullable=False),
        sa.Column("response", sa.LargeBinary(), nullable=False),
        sa.Index("ix_responses_tenant_id_size_bytes", "tenant_id", "size_bytes"),
        sa.Index("ix_responses_expires_at", "expires_at"),
    )
    if op.get_bind().dialect.name == "postgresql":
        _secure_rows()


def downgrade() -> None:
    """Go back."""
    op.drop_table("responses")


def _secure_rows() -> None:
    """Let a tenant's transaction see and write its own rows only, as in the first revision."""
    own = "tenant_id = (SELECT current_setting('app.tenant', true))"
    op.execute("ALTER TABLE responses ENABLE ROW LEVEL SECURITY")
    op.execute(
        f"CREATE POLICY tenant ON responses TO loraplex_tenant USING ({own}) WITH CHECK ({own})"
    )
    op.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON responses TO loraplex_tenant")
