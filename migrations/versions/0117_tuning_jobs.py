"""Fine-tuning jobs, their events and checkpoints, trained tokens, and the lineage of versions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraplex.migrations.initial.columns import AUTHOR, ID, MOMENT, NAME, one_of, tenant_id

revision = "0117"
down_revision = "0114"
branch_labels = None
depends_on = None

_TABLES = ("tuning_jobs", "tuning_events", "tuning_checkpoints")
"""Each after those that it refers to."""

_LONG_ID, _SHA256, _WORD, _REASON = sa.String(40), sa.String(64), sa.String(16), sa.String(64)
_OLD_PURPOSES = ("batch", "batch_output")


def upgrade() -> None:
    """Go forward."""
    _check_purposes(*_OLD_PURPOSES, "fine-tune")
    op.add_column(
        "usage_days",
        sa.Column("trained_tokens", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
    )
    op.add_column("adapter_versions", sa.Column("lineage", sa.JSON(none_as_null=True)))
    _create_jobs()
    op.create_table(
        "tuning_events",
        sa.Column("id", _LONG_ID, primary_key=True),
        tenant_id(),
        sa.Column("job_id", _LONG_ID, sa.ForeignKey("tuning_jobs.id"), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("level", _WORD, nullable=False),
        sa.Column("kind", _WORD, nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(none_as_null=True)),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Index("ix_tuning_events_job_id_number", "job_id", "number"),
    )
    op.create_table(
        "tuning_checkpoints",
        sa.Column("id", _LONG_ID, primary_key=True),
        tenant_id(),
        sa.Column("job_id", _LONG_ID, sa.ForeignKey("tuning_jobs.id"), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        *(
            sa.Column(f"{part}_{figure}", sa.Float())
            for part in ("train", "valid")
            for figure in ("loss", "accuracy")
        ),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Index("ix_tuning_checkpoints_job_id_step", "job_id", "step"),
    )
    if op.get_bind().dialect.name == "postgresql":
        _secure_rows()


def downgrade() -> None:
    """Go back. Files of the purpose `fine-tune` are lost."""
    for table in reversed(_TABLES):
        op.drop_table(table)
    op.drop_column("adapter_versions", "lineage")
    op.drop_column("usage_days", "trained_tokens")
    op.execute("DELETE FROM files WHERE purpose = 'fine-tune'")
    _check_purposes(*_OLD_PURPOSES)


def _create_jobs() -> None:
    op.create_table(
        "tuning_jobs",
        sa.Column("id", _LONG_ID, primary_key=True),
        tenant_id(),
        sa.Column("adapter_name", NAME, nullable=False),
        sa.Column("created_by", AUTHOR, nullable=False),
        sa.Column("training_file_id", _LONG_ID, nullable=False),
        sa.Column("training_sha256", _SHA256, nullable=False),
        sa.Column("validation_file_id", _LONG_ID),
        sa.Column("validation_sha256", _SHA256),
        sa.Column("recipe", sa.JSON(), nullable=False),
        sa.Column("labels", sa.JSON(none_as_null=True)),
        one_of("state", "queued", "running", "paused", "succeeded", "failed", "cancelled"),
        sa.Column("server_id", ID),
        sa.Column("num_steps", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_restarts", sa.Integer(), nullable=False),
        sa.Column("error_code", _REASON),
        sa.Column("error_message", sa.Text()),
        sa.Column("error_param", _REASON),
        sa.Column("version", sa.Integer()),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("started_at", MOMENT),
        sa.Column("finalizing_at", MOMENT),
        sa.Column("ended_at", MOMENT),
        sa.Index("ix_tuning_jobs_tenant_id_created_at_id", "tenant_id", "created_at", "id"),
        sa.Index("ix_tuning_jobs_tenant_id_started_at", "tenant_id", "started_at"),
        sa.Index("ix_tuning_jobs_state", "state"),
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
