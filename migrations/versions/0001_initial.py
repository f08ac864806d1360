"""Tenants, API keys, adapters with versions and aliases, uploads, and the usage ledger."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

VERSION_STATES = ("validated", "attesting", "ready", "rejected", "deleting", "deleted")
UPLOAD_STATES = ("receiving", "validating", "accepted", "rejected", "abandoned")


def upgrade() -> None:
    """Go forward."""
    _create_tenants()
    _create_api_keys()
    _create_adapters()
    _create_adapter_versions()
    _create_adapter_aliases()
    _create_uploads()
    _create_usage_records()


def downgrade() -> None:
    """Go back."""
    for table in (
        "usage_records",
        "uploads",
        "adapter_aliases",
        "adapter_versions",
        "adapters",
        "api_keys",
        "tenants",
    ):
        op.drop_table(table)


def _create_tenants() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("slug", sa.String(63), nullable=False),
        sa.Column("name", sa.String(200), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("suspended_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_tenants"),
        sa.UniqueConstraint("slug", name="uq_tenants_slug"),
    )


def _create_api_keys() -> None:
    op.create_table(
        "api_keys",
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("id", sa.String(12), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("mac", sa.LargeBinary(32), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        _tenant_key("api_keys"),
        sa.UniqueConstraint("tenant_id", "id", name="uq_api_keys_tenant_id_id"),
    )


def _create_adapters() -> None:
    op.create_table(
        "adapters",
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_adapters"),
        _tenant_key("adapters"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_adapters_tenant_id_name"),
        sa.UniqueConstraint("tenant_id", "id", name="uq_adapters_tenant_id_id"),
    )


def _create_adapter_versions() -> None:
    op.create_table(
        "adapter_versions",
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("adapter_id", sa.String(36), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(71), nullable=False),
        sa.Column("base_id", sa.String(128), nullable=False),
        sa.Column("object_sha256", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("state_changed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("reason_code", sa.String(64), nullable=True),
        sa.Column("reason_message", sa.Text(), nullable=True),
        sa.Column("intake_report", sa.JSON(), nullable=False),
        sa.Column("attestation_report", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_by", sa.String(12), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_adapter_versions"),
        _tenant_key("adapter_versions"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id"],
            ["adapters.tenant_id", "adapters.id"],
            name="fk_adapter_versions_tenant_id_adapters",
        ),
        _creator_key("adapter_versions"),
        sa.UniqueConstraint(
            "tenant_id",
            "adapter_id",
            "number",
            name="uq_adapter_versions_tenant_id_adapter_id_number",
        ),
        sa.UniqueConstraint(
            "tenant_id", "adapter_id", "id", name="uq_adapter_versions_tenant_id_adapter_id_id"
        ),
        sa.UniqueConstraint("tenant_id", "id", name="uq_adapter_versions_tenant_id_id"),
        _state_check("adapter_versions", VERSION_STATES),
        sa.CheckConstraint("number >= 1", name=op.f("ck_adapter_versions_number")),
        sa.CheckConstraint("size_bytes >= 0", name=op.f("ck_adapter_versions_size_bytes")),
    )
    is_live = sa.text("state IN ('validated', 'attesting', 'ready')")
    op.create_index(
        "uq_adapter_versions_live_digest",
        "adapter_versions",
        ["tenant_id", "adapter_id", "digest"],
        unique=True,
        sqlite_where=is_live,
        postgresql_where=is_live,
    )
    op.create_index(
        "ix_adapter_versions_tenant_id_digest", "adapter_versions", ["tenant_id", "digest"]
    )
    op.create_index("ix_adapter_versions_state", "adapter_versions", ["state"])


def _create_adapter_aliases() -> None:
    op.create_table(
        "adapter_aliases",
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("adapter_id", sa.String(36), nullable=False),
        sa.Column("version_id", sa.String(36), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_adapter_aliases"),
        _tenant_key("adapter_aliases"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id"],
            ["adapters.tenant_id", "adapters.id"],
            name="fk_adapter_aliases_tenant_id_adapters",
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "version_id"],
            ["adapter_versions.tenant_id", "adapter_versions.adapter_id", "adapter_versions.id"],
            name="fk_adapter_aliases_tenant_id_adapter_versions",
        ),
        sa.UniqueConstraint(
            "tenant_id", "adapter_id", "name", name="uq_adapter_aliases_tenant_id_adapter_id_name"
        ),
    )


def _create_uploads() -> None:
    op.create_table(
        "uploads",
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("adapter_name", sa.String(64), nullable=False),
        sa.Column("config_json", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("received_bytes", sa.BigInteger(), nullable=False),
        sa.Column("aliases", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason_code", sa.String(64), nullable=True),
        sa.Column("reason_message", sa.Text(), nullable=True),
        sa.Column("version_id", sa.String(36), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_by", sa.String(12), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_uploads"),
        _tenant_key("uploads"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "version_id"],
            ["adapter_versions.tenant_id", "adapter_versions.id"],
            name="fk_uploads_tenant_id_adapter_versions",
        ),
        _creator_key("uploads"),
        _state_check("uploads", UPLOAD_STATES),
        sa.CheckConstraint("size_bytes >= 1", name=op.f("ck_uploads_size_bytes")),
        sa.CheckConstraint(
            "received_bytes >= 0 AND received_bytes <= size_bytes",
            name=op.f("ck_uploads_received_bytes"),
        ),
    )
    op.create_index("ix_uploads_tenant_id_created_at", "uploads", ["tenant_id", "created_at"])
    op.create_index("ix_uploads_state", "uploads", ["state"])


def _create_usage_records() -> None:
    op.create_table(
        "usage_records",
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("adapter_name", sa.String(64), nullable=True),
        sa.Column("adapter_version", sa.Integer(), nullable=True),
        sa.Column("adapter_digest", sa.String(71), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("tier", sa.String(16), nullable=True),
        sa.Column("finish_reason", sa.String(32), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name="pk_usage_records"),
        _tenant_key("usage_records"),
        sa.CheckConstraint(
            "prompt_tokens >= 0 AND completion_tokens >= 0"
            " AND cached_tokens >= 0 AND cached_tokens <= prompt_tokens",
            name=op.f("ck_usage_records_tokens"),
        ),
    )
    op.create_index(
        "ix_usage_records_tenant_id_created_at", "usage_records", ["tenant_id", "created_at"]
    )


def _tenant_key(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["tenant_id"], ["tenants.id"], name=f"fk_{table}_tenant_id_tenants"
    )


def _creator_key(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["tenant_id", "created_by"],
        ["api_keys.tenant_id", "api_keys.id"],
        name=f"fk_{table}_tenant_id_api_keys",
    )


def _state_check(table: str, states: tuple[str, ...]) -> sa.CheckConstraint:
    listed = ", ".join(f"'{state}'" for state in states)
    return sa.CheckConstraint(f"state IN ({listed})", name=op.f(f"ck_{table}_state"))
