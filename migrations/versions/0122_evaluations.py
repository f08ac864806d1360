"""Golden sets and evaluations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraplex.migrations.initial.columns import (
    AUTHOR,
    DIGEST,
    ID,
    KEY_ID,
    MOMENT,
    NAME,
    one_of,
    tenant_id,
)

revision = "0122"
down_revision = "0121"
branch_labels = None
depends_on = None

_TABLES = ("golden_sets", "evaluations")
_LONG_ID, _SHA256, _REASON = sa.String(40), sa.String(64), sa.String(64)
_ADDRESS, _MODEL = sa.String(45), sa.String(256)


def upgrade() -> None:
    """Go forward."""
    op.create_table(
        "golden_sets",
        sa.Column("id", ID, primary_key=True),
        tenant_id(),
        sa.Column("adapter_name", NAME, nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("file_id", _LONG_ID, nullable=False),
        sa.Column("sha256", _SHA256, nullable=False),
        sa.Column("num_cases", sa.Integer(), nullable=False),
        sa.Column("tolerance", sa.Float(), nullable=False),
        sa.Column("judge", _MODEL),
        sa.Column("key_id", KEY_ID),
        sa.Column("address", _ADDRESS),
        sa.Column("created_by", AUTHOR, nullable=False),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.UniqueConstraint("tenant_id", "adapter_name", "name"),
        sa.Index("ix_golden_sets_tenant_id_file_id", "tenant_id", "file_id"),
    )
    op.create_table(
        "evaluations",
        sa.Column("id", _LONG_ID, primary_key=True),
        tenant_id(),
        sa.Column("adapter_name", NAME, nullable=False),
        sa.Column("golden_set_name", NAME, nullable=False),
        sa.Column("file_id", _LONG_ID, nullable=False),
        sa.Column("sha256", _SHA256, nullable=False),
        sa.Column("num_cases", sa.Integer(), nullable=False),
        sa.Column("tolerance", sa.Float(), nullable=False),
        sa.Column("judge", _MODEL),
        sa.Column("base_name", _MODEL, nullable=False),
        sa.Column("version_number", sa.Integer(), nullable=False),
        sa.Column("version_digest", DIGEST, nullable=False),
        sa.Column("against_number", sa.Integer()),
        sa.Column("against_digest", DIGEST),
        sa.Column("key_id", KEY_ID, nullable=False),
        sa.Column("address", _ADDRESS),
        one_of("state", "queued", "running", "succeeded", "failed", "cancelled"),
        sa.Column("batch_id", _LONG_ID),
        sa.Column("batches", sa.JSON(), nullable=False),
        sa.Column("is_regression", sa.Boolean()),
        sa.Column("slices", sa.JSON(none_as_null=True)),
        sa.Column("cases", sa.JSON(none_as_null=True)),
        sa.Column("error_code", _REASON),
        sa.Column("error_message", sa.Text()),
        sa.Column("created_by", AUTHOR, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("started_at", MOMENT),
        sa.Column("ended_at", MOMENT),
        sa.Index(
            "ix_evaluations_tenant_id_adapter_name_created_at_id",
            "tenant_id",
            "adapter_name",
            "created_at",
            "id",
        ),
        sa.Index("ix_evaluations_state", "state"),
    )
    if op.get_bind().dialect.name == "postgresql":
        _secure_rows()


def downgrade() -> None:
    """Go back."""
    for table in reversed(_TABLES):
        op.drop_table(table)


def _secure_rows() -> None:
    """Let a tenant's transaction see and write its own rows only, as in the first revision."""
    own = "tenant_id = (SELECT current_setting('app.tenant', true))"
    for table in _TABLES:
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(
            f"CREATE POLICY tenant ON {table} TO loraplex_tenant USING ({own}) WITH CHECK ({own})"
        )
        op.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO loraplex_tenant")
