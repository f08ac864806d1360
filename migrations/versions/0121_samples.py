"""Samples of requests, the opt-in to keep them, and files made of them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraplex.migrations.initial.columns import AUTHOR, ID, MOMENT, REQUEST_ID, one_of, tenant_id

revision = "0121"
down_revision = "0117"
branch_labels = None
depends_on = None

_TABLES = ("adapter_sampling", "samples")
_OLD_PURPOSES = ("batch", "batch_output", "fine-tune")


def upgrade() -> None:
    """Go forward."""
    _check_purposes(*_OLD_PURPOSES, "evals")
    op.add_column(
        "files",
        sa.Column("has_samples", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.create_table(
        "adapter_sampling",
        sa.Column("adapter_id", ID, primary_key=True),
        tenant_id(),
        sa.Column("percent", sa.Float(), nullable=False),
        sa.Column("days", sa.Integer(), nullable=False),
        sa.Column("since", MOMENT, nullable=False),
        sa.Column("changed_at", MOMENT, nullable=False),
        sa.Column("changed_by", AUTHOR, nullable=False),
        sa.ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        sa.CheckConstraint("percent > 0 AND percent <= 100", name="percent"),
        sa.CheckConstraint("days >= 1", name="days"),
    )
    _create_samples()
    if op.get_bind().dialect.name == "postgresql":
        _secure_rows()


def downgrade() -> None:
    """Go back. Samples and golden sets are lost, and files made of samples are no longer hidden
    from anyone, so their rows are removed."""
    for table in reversed(_TABLES):
        op.drop_table(table)
    op.execute("DELETE FROM files WHERE has_samples OR purpose = 'evals'")
    op.drop_column("files", "has_samples")
    _check_purposes(*_OLD_PURPOSES)


def _create_samples() -> None:
    op.create_table(
        "samples",
        sa.Column("id", sa.String(40), primary_key=True),
        tenant_id(),
        sa.Column("adapter_id", ID, nullable=False),
        sa.Column("version_number", sa.Integer(), nullable=False),
        sa.Column("request_id", REQUEST_ID, nullable=False),
        one_of("kind", "chat", "completion"),
        sa.Column("finish_reason", sa.String(16), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("size_bytes", sa.Integer(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("expires_at", MOMENT, nullable=False),
        sa.Column("secret_id", sa.String(8), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "version_number"],
            [
                "adapter_versions.tenant_id",
                "adapter_versions.adapter_id",
                "adapter_versions.number",
            ],
            name="fk_samples_version_number_adapter_versions",
        ),
        sa.Index(
            "ix_samples_tenant_id_adapter_id_created_at_id",
            *("tenant_id", "adapter_id", "created_at", "id"),
        ),
        sa.Index("ix_samples_tenant_id_size_bytes", "tenant_id", "size_bytes"),
        sa.Index("ix_samples_expires_at", "expires_at"),
        sa.Index("ix_samples_created_at", "created_at"),
        sa.Index("ix_samples_secret_id", "secret_id"),
    )


def _check_purposes(*purposes: str) -> None:
    """Allow these purposes of files. SQLite copies the table, without the check that it had."""
    words = ", ".join(f"'{purpose}'" for purpose in purposes)
    with op.batch_alter_table("files") as files:
        if op.get_bind().dialect.name == "postgresql":
            files.drop_constraint(op.f("ck_files_purpose"), type_="check")
        files.create_check_constraint(op.f("ck_files_purpose"), f"purpose IN ({words})")


def _secure_rows() -> None:
    """Let a tenant's transaction see and write its own rows only, as in the first revision."""
    own = "tenant_id = (SELECT current_setting('app.tenant', true))"
    for table in _TABLES:
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(
            f"CREATE POLICY tenant ON {table} TO loraplex_tenant USING ({own}) WITH CHECK ({own})"
        )
        op.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO loraplex_tenant")
