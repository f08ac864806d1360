"""Canaries, the histories of aliases and versions, wishes, receipts; what lists stay fast by."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

VERSION_STATES = ("validated", "attesting", "ready", "rejected", "deleting", "deleted")
UPLOAD_INDEXES = (
    ("state", "updated_at"),
    ("tenant_id", "sha256", "created_at"),
    ("tenant_id", "version_id", "created_at"),
)
VERSION_ID = [
    "adapter_versions.tenant_id",
    "adapter_versions.adapter_id",
    "adapter_versions.id",
]
VERSION_NUMBER = [
    "adapter_versions.tenant_id",
    "adapter_versions.adapter_id",
    "adapter_versions.number",
]


def upgrade() -> None:
    """Go forward."""
    _mark_visible_adapters()
    _split_aliases()
    _date_uploads()
    _create_alias_changes()
    _create_version_transitions()
    _create_wishes()
    _create_receipts()


def downgrade() -> None:
    """Go back. Canaries end, histories, wishes and receipts are lost."""
    for name in (
        "deletion_receipts",
        "adapter_wishes",
        "adapter_version_transitions",
        "adapter_alias_changes",
    ):
        op.drop_table(name)
    _forget_dates_of_uploads()
    _end_canaries()
    op.drop_index("ix_adapters_tenant_id_is_visible_name", "adapters")
    with op.batch_alter_table("adapters") as table:
        table.drop_column("is_visible")


def _mark_visible_adapters() -> None:
    op.add_column("adapters", sa.Column("is_visible", sa.Boolean(), nullable=True))
    op.execute(
        "UPDATE adapters SET is_visible = EXISTS (SELECT 1 FROM adapter_versions"
        " WHERE adapter_versions.tenant_id = adapters.tenant_id"
        " AND adapter_versions.adapter_id = adapters.id"
        " AND adapter_versions.state NOT IN ('deleting', 'deleted'))"
    )
    with op.batch_alter_table("adapters") as table:
        table.alter_column("is_visible", existing_type=sa.Boolean(), nullable=False)
    op.create_index(
        "ix_adapters_tenant_id_is_visible_name", "adapters", ["tenant_id", "is_visible", "name"]
    )


def _split_aliases() -> None:
    with op.batch_alter_table("adapter_aliases") as table:
        table.add_column(sa.Column("canary_version_id", sa.String(36), nullable=True))
        table.add_column(sa.Column("canary_percent", sa.Float(), nullable=True))
        table.create_foreign_key(
            "fk_adapter_aliases_canary_version_id_adapter_versions",
            "adapter_versions",
            ["tenant_id", "adapter_id", "canary_version_id"],
            ["tenant_id", "adapter_id", "id"],
        )
        table.create_check_constraint(
            op.f("ck_adapter_aliases_canary"),
            sa.text("(canary_percent IS NULL) = (canary_version_id IS NULL)"),
        )
        table.create_check_constraint(
            op.f("ck_adapter_aliases_canary_percent"),
            sa.text("canary_percent > 0 AND canary_percent < 100"),
        )
        table.create_check_constraint(
            op.f("ck_adapter_aliases_canary_version_id"),
            sa.text("canary_version_id <> version_id"),
        )


def _end_canaries() -> None:
    with op.batch_alter_table("adapter_aliases") as table:
        for check in ("canary", "canary_percent", "canary_version_id"):
            table.drop_constraint(op.f(f"ck_adapter_aliases_{check}"), type_="check")
        table.drop_constraint(
            "fk_adapter_aliases_canary_version_id_adapter_versions", type_="foreignkey"
        )
        table.drop_column("canary_percent")
        table.drop_column("canary_version_id")


def _date_uploads() -> None:
    op.add_column("uploads", sa.Column("updated_at", sa.DateTime(timezone=True), nullable=True))
    op.execute("UPDATE uploads SET updated_at = created_at")
    with op.batch_alter_table("uploads") as table:
        table.alter_column("updated_at", existing_type=sa.DateTime(timezone=True), nullable=False)
    op.drop_index("ix_uploads_state", "uploads")
    for columns in UPLOAD_INDEXES:
        op.create_index(f"ix_uploads_{'_'.join(columns)}", "uploads", list(columns))


def _forget_dates_of_uploads() -> None:
    for columns in UPLOAD_INDEXES:
        op.drop_index(f"ix_uploads_{'_'.join(columns)}", "uploads")
    with op.batch_alter_table("uploads") as table:
        table.drop_column("updated_at")
    op.create_index("ix_uploads_state", "uploads", ["state"])


def _create_alias_changes() -> None:
    table = "adapter_alias_changes"
    op.create_table(
        table,
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("adapter_id", sa.String(36), nullable=False),
        sa.Column("alias", sa.String(64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("version_number", sa.Integer(), nullable=True),
        sa.Column("canary_number", sa.Integer(), nullable=True),
        sa.Column("canary_percent", sa.Float(), nullable=True),
        sa.Column("previous_number", sa.Integer(), nullable=True),
        sa.Column("changed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("changed_by", sa.String(12), nullable=True),
        sa.PrimaryKeyConstraint("adapter_id", "alias", "number", name=f"pk_{table}"),
        _tenant_key(table),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id"],
            ["adapters.tenant_id", "adapters.id"],
            name=f"fk_{table}_tenant_id_adapters",
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "version_number"],
            VERSION_NUMBER,
            name=f"fk_{table}_version_number_adapter_versions",
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "canary_number"],
            VERSION_NUMBER,
            name=f"fk_{table}_canary_number_adapter_versions",
        ),
        sa.ForeignKeyConstraint(
            ["adapter_id", "alias", "previous_number"],
            [f"{table}.adapter_id", f"{table}.alias", f"{table}.number"],
            name=f"fk_{table}_previous_number_{table}",
        ),
        _key_of_who(table, "changed_by"),
        _one_of(table, "action", ("set", "canary", "rollback", "remove")),
        sa.CheckConstraint("number >= 1", name=op.f(f"ck_{table}_number")),
        sa.CheckConstraint("previous_number < number", name=op.f(f"ck_{table}_previous_number")),
        sa.CheckConstraint(
            "(action = 'remove') = (version_number IS NULL)",
            name=op.f(f"ck_{table}_version_number"),
        ),
        sa.CheckConstraint(
            "(canary_percent IS NULL) = (canary_number IS NULL)", name=op.f(f"ck_{table}_canary")
        ),
        sa.CheckConstraint(
            "canary_percent > 0 AND canary_percent < 100", name=op.f(f"ck_{table}_canary_percent")
        ),
        sa.CheckConstraint(
            "canary_number <> version_number", name=op.f(f"ck_{table}_canary_number")
        ),
    )
    op.execute(
        "INSERT INTO adapter_alias_changes"
        " (tenant_id, adapter_id, alias, number, action, version_number, changed_at)"
        " SELECT aliases.tenant_id, aliases.adapter_id, aliases.name, 1, 'set', versions.number,"
        " aliases.updated_at FROM adapter_aliases AS aliases"
        " JOIN adapter_versions AS versions ON versions.id = aliases.version_id"
    )


def _create_version_transitions() -> None:
    table = "adapter_version_transitions"
    op.create_table(
        table,
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("version_id", sa.String(36), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason_code", sa.String(64), nullable=True),
        sa.Column("reason_message", sa.Text(), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("version_id", "number", name=f"pk_{table}"),
        _tenant_key(table),
        sa.ForeignKeyConstraint(
            ["tenant_id", "version_id"],
            ["adapter_versions.tenant_id", "adapter_versions.id"],
            name=f"fk_{table}_tenant_id_adapter_versions",
        ),
        _one_of(table, "state", VERSION_STATES),
        sa.CheckConstraint("number >= 1", name=op.f(f"ck_{table}_number")),
    )
    # Of what was there before, the beginning is known, and how it stands.
    op.execute(
        "INSERT INTO adapter_version_transitions (tenant_id, version_id, number, state, at)"
        " SELECT tenant_id, id, 1, 'validated', created_at FROM adapter_versions"
    )
    op.execute(
        "INSERT INTO adapter_version_transitions"
        " (tenant_id, version_id, number, state, reason_code, reason_message, at)"
        " SELECT tenant_id, id, 2, state,"
        " CASE WHEN state = 'rejected' THEN reason_code END,"
        " CASE WHEN state = 'rejected' THEN reason_message END, state_changed_at"
        " FROM adapter_versions WHERE state <> 'validated'"
    )


def _create_wishes() -> None:
    table = "adapter_wishes"
    op.create_table(
        table,
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("version_id", sa.String(36), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("adapter_id", sa.String(36), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_by", sa.String(12), nullable=True),
        sa.PrimaryKeyConstraint("version_id", "kind", name=f"pk_{table}"),
        _tenant_key(table),
        _version_key(table),
        _key_of_who(table, "created_by"),
        _one_of(table, "kind", ("pin", "prefetch")),
    )
    op.create_index(f"ix_{table}_tenant_id_adapter_id", table, ["tenant_id", "adapter_id"])
    op.create_index(f"ix_{table}_tenant_id_kind", table, ["tenant_id", "kind"])
    op.create_index(f"ix_{table}_expires_at", table, ["expires_at"])


def _create_receipts() -> None:
    table = "deletion_receipts"
    op.create_table(
        table,
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("version_id", sa.String(36), nullable=False),
        sa.Column("adapter_id", sa.String(36), nullable=False),
        sa.Column("version_number", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(71), nullable=False),
        sa.Column("requested_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("receipt", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("version_id", name=f"pk_{table}"),
        _tenant_key(table),
        _version_key(table),
    )
    op.create_index(f"ix_{table}_tenant_id_adapter_id", table, ["tenant_id", "adapter_id"])


def _tenant_key(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["tenant_id"], ["tenants.id"], name=f"fk_{table}_tenant_id_tenants"
    )


def _version_key(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["tenant_id", "adapter_id", "version_id"],
        VERSION_ID,
        name=f"fk_{table}_tenant_id_adapter_versions",
    )


def _key_of_who(table: str, column: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["tenant_id", column],
        ["api_keys.tenant_id", "api_keys.id"],
        name=f"fk_{table}_tenant_id_api_keys",
    )


def _one_of(table: str, column: str, values: tuple[str, ...]) -> sa.CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return sa.CheckConstraint(f"{column} IN ({listed})", name=op.f(f"ck_{table}_{column}"))
