"""Webhooks and their deliveries."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraplex.migrations.initial.columns import AUTHOR, ID, MOMENT, one_of, tenant_id

revision = "0107"
down_revision = "0101"
branch_labels = None
depends_on = None

_LONG_ID, _WORD = sa.String(40), sa.String(32)
_TABLES = ("webhook_endpoints", "webhook_deliveries")


def upgrade() -> None:
    """Go forward."""
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", _LONG_ID, primary_key=True),
        tenant_id(),
        sa.Column("url", sa.String(2048), nullable=False),
        sa.Column("description", sa.String(200)),
        sa.Column("events", sa.JSON(none_as_null=True)),
        sa.Column("secret", sa.LargeBinary(), nullable=False),
        sa.Column("previous_secret", sa.LargeBinary()),
        sa.Column("previous_until", MOMENT),
        sa.Column("secret_id", sa.String(8), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("created_by", AUTHOR, nullable=False),
        sa.Column("failing_since", MOMENT),
        sa.Column("num_dropped", sa.Integer(), nullable=False),
        sa.Column("disabled_at", MOMENT),
        sa.Column("disabled_by", _WORD),
        sa.Index("ix_webhook_endpoints_tenant_id", "tenant_id"),
    )
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", ID, primary_key=True),
        tenant_id(),
        sa.Column("endpoint_id", _LONG_ID, sa.ForeignKey("webhook_endpoints.id"), nullable=False),
        sa.Column("event_id", _LONG_ID, nullable=False),
        sa.Column("type", _WORD, nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        one_of("state", "pending", "delivered", "failed"),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("due_at", MOMENT, nullable=False),
        sa.Column("server_id", ID),
        sa.Column("num_attempts", sa.Integer(), nullable=False),
        sa.Column("last_status", sa.Integer()),
        sa.Column("last_failure", _WORD),
        sa.Column("ended_at", MOMENT),
        sa.Index(
            "ix_webhook_deliveries_endpoint_id_created_at_id", "endpoint_id", "created_at", "id"
        ),
        sa.Index("ix_webhook_deliveries_endpoint_id_state", "endpoint_id", "state"),
        sa.Index("ix_webhook_deliveries_state_due_at", "state", "due_at"),
        sa.Index("ix_webhook_deliveries_created_at", "created_at"),
    )
    if op.get_bind().dialect.name == "postgresql":
        for table in _TABLES:
            _secure_rows(table)


def downgrade() -> None:
    """Go back."""
    for table in reversed(_TABLES):
        op.drop_table(table)


def _secure_rows(table: str) -> None:
    """Let a tenant's transaction see and write its own rows only, as in the first revision."""
    own = "tenant_id = (SELECT current_setting('app.tenant', true))"
    op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    op.execute(
        f"CREATE POLICY tenant ON {table} TO loraplex_tenant USING ({own}) WITH CHECK ({own})"
    )
    op.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO loraplex_tenant")
