"""Identities at an identity provider, and how each session was opened."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraplex.migrations.initial.columns import ID, MOMENT, tenant_id

revision = "0105"
down_revision = "0108"
branch_labels = None
depends_on = None

_ISSUER = sa.String(255)
_IS_OPERATORS = sa.text("tenant_id IS NULL")


def upgrade() -> None:
    """Go forward."""
    op.add_column("account_sessions", sa.Column("issuer", _ISSUER))
    op.create_table(
        "identities",
        tenant_id(nullable=True),
        sa.Column("id", ID, primary_key=True),
        sa.Column("issuer", _ISSUER, nullable=False),
        sa.Column("subject", sa.String(255), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.UniqueConstraint("tenant_id", "issuer", "subject"),
    )
    op.create_index(
        "uq_identities_operators",
        "identities",
        ["issuer", "subject"],
        unique=True,
        sqlite_where=_IS_OPERATORS,
        postgresql_where=_IS_OPERATORS,
    )
    op.create_table(
        "spent_flows",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("expires_at", MOMENT, nullable=False),
    )
    if op.get_bind().dialect.name == "postgresql":
        _secure_rows()


def downgrade() -> None:
    """Go back."""
    op.drop_table("spent_flows")
    op.drop_table("identities")
    op.drop_column("account_sessions", "issuer")


def _secure_rows() -> None:
    """Let a tenant's transaction see and write its own identities only, and no flow."""
    own = "tenant_id = (SELECT current_setting('app.tenant', true))"
    op.execute("ALTER TABLE identities ENABLE ROW LEVEL SECURITY")
    op.execute(
        f"CREATE POLICY tenant ON identities TO loraplex_tenant USING ({own}) WITH CHECK ({own})"
    )
    op.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON identities TO loraplex_tenant")
