"""Adapters with their versions and aliases, uploads, and what happened to them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from .columns import AUTHOR, DIGEST, ID, MOMENT, NAME, one_of, tenant_id

VERSION_STATES = ("validated", "attesting", "ready", "rejected", "deleting", "deleted")
VERSION_ID = ["adapter_versions.tenant_id", "adapter_versions.adapter_id", "adapter_versions.id"]
VERSION_NUMBER = [*VERSION_ID[:2], "adapter_versions.number"]


def create_tables() -> None:
    """Create the tables, each after those that it refers to."""
    _create_adapters()
    _create_aliases_and_wishes()
    _create_uploads()
    _create_alias_changes()
    _create_version_histories()


def _create_adapters() -> None:
    op.create_table(
        "adapters",
        tenant_id(),
        sa.Column("id", ID, primary_key=True),
        sa.Column("name", NAME, nullable=False),
        sa.Column("is_visible", sa.Boolean(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.UniqueConstraint("tenant_id", "name"),
        sa.UniqueConstraint("tenant_id", "id"),
        sa.Index(None, "tenant_id", "is_visible", "name"),
    )
    is_live = sa.text("state IN ('validated', 'attesting', 'ready')")
    op.create_table(
        "adapter_versions",
        tenant_id(),
        sa.Column("id", ID, primary_key=True),
        sa.Column("adapter_id", ID, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("digest", DIGEST, nullable=False),
        sa.Column("base_id", sa.String(128), nullable=False),
        sa.Column("object_sha256", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        one_of("state", *VERSION_STATES),
        sa.Column("state_changed_at", MOMENT, nullable=False),
        sa.Column("reason_code", sa.String(64)),
        sa.Column("reason_message", sa.Text()),
        sa.Column("intake_report", sa.JSON(), nullable=False),
        sa.Column("attestation_report", sa.JSON()),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("created_by", AUTHOR),
        sa.ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        sa.UniqueConstraint("tenant_id", "adapter_id", "number"),
        sa.UniqueConstraint("tenant_id", "adapter_id", "id"),
        sa.UniqueConstraint("tenant_id", "id"),
        sa.CheckConstraint("number >= 1", name="number"),
        sa.CheckConstraint("size_bytes >= 0", name="size_bytes"),
        sa.Index(
            "uq_adapter_versions_live_digest",
            "tenant_id",
            "adapter_id",
            "digest",
            unique=True,
            sqlite_where=is_live,
            postgresql_where=is_live,
        ),
        sa.Index(None, "tenant_id", "digest"),
        sa.Index(None, "state"),
    )


def _create_aliases_and_wishes() -> None:
    op.create_table(
        "adapter_aliases",
        tenant_id(),
        sa.Column("id", ID, primary_key=True),
        sa.Column("adapter_id", ID, nullable=False),
        sa.Column("version_id", ID, nullable=False),
        sa.Column("canary_version_id", ID),
        sa.Column("canary_percent", sa.Float()),
        sa.Column("name", NAME, nullable=False),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        _version_key("version_id"),
        _version_key("canary_version_id", "fk_adapter_aliases_canary_version_id_adapter_versions"),
        sa.UniqueConstraint("tenant_id", "adapter_id", "name"),
        *_canary_checks("version_id", "canary_version_id"),
    )
    op.create_table(
        "adapter_wishes",
        tenant_id(),
        sa.Column("version_id", ID, primary_key=True),
        one_of("kind", "pin", "prefetch", primary_key=True),
        sa.Column("adapter_id", ID, nullable=False),
        sa.Column("expires_at", MOMENT),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("created_by", AUTHOR),
        _version_key("version_id"),
        sa.Index(None, "tenant_id", "adapter_id"),
        sa.Index(None, "tenant_id", "kind"),
        sa.Index(None, "expires_at"),
    )


def _create_uploads() -> None:
    op.create_table(
        "uploads",
        tenant_id(),
        sa.Column("id", ID, primary_key=True),
        sa.Column("adapter_name", NAME, nullable=False),
        sa.Column("config_json", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("received_bytes", sa.BigInteger(), nullable=False),
        sa.Column("aliases", sa.JSON(), nullable=False),
        one_of("state", "receiving", "validating", "accepted", "rejected", "abandoned"),
        sa.Column("reason_code", sa.String(64)),
        sa.Column("reason_message", sa.Text()),
        sa.Column("version_id", ID),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.Column("created_by", AUTHOR),
        sa.Column("server_id", ID, nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "version_id"], ["adapter_versions.tenant_id", "adapter_versions.id"]
        ),
        sa.CheckConstraint("size_bytes >= 1", name="size_bytes"),
        sa.CheckConstraint(
            "received_bytes >= 0 AND received_bytes <= size_bytes", name="received_bytes"
        ),
        sa.Index(None, "tenant_id", "created_at"),
        sa.Index(None, "tenant_id", "sha256", "created_at"),
        sa.Index(None, "tenant_id", "version_id", "created_at"),
        sa.Index(None, "state", "updated_at"),
    )


def _create_alias_changes() -> None:
    changes = "adapter_alias_changes"
    op.create_table(
        changes,
        tenant_id(),
        sa.Column("adapter_id", ID, primary_key=True),
        sa.Column("alias", NAME, primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True),
        one_of("action", "set", "canary", "rollback", "remove"),
        sa.Column("version_number", sa.Integer()),
        sa.Column("canary_number", sa.Integer()),
        sa.Column("canary_percent", sa.Float()),
        sa.Column("previous_number", sa.Integer()),
        sa.Column("changed_at", MOMENT, nullable=False),
        sa.Column("changed_by", AUTHOR),
        sa.ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        *(
            sa.ForeignKeyConstraint(
                ["tenant_id", "adapter_id", number],
                VERSION_NUMBER,
                name=f"fk_{changes}_{number}_adapter_versions",
            )
            for number in ("version_number", "canary_number")
        ),
        sa.ForeignKeyConstraint(
            ["adapter_id", "alias", "previous_number"],
            [f"{changes}.adapter_id", f"{changes}.alias", f"{changes}.number"],
            name=f"fk_{changes}_previous_number_{changes}",
        ),
        sa.CheckConstraint("number >= 1", name="number"),
        sa.CheckConstraint("previous_number < number", name="previous_number"),
        sa.CheckConstraint("(action = 'remove') = (version_number IS NULL)", name="version_number"),
        *_canary_checks("version_number", "canary_number"),
    )


def _create_version_histories() -> None:
    op.create_table(
        "adapter_version_transitions",
        tenant_id(),
        sa.Column("version_id", ID, primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True),
        one_of("state", *VERSION_STATES),
        sa.Column("reason_code", sa.String(64)),
        sa.Column("reason_message", sa.Text()),
        sa.Column("at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "version_id"], ["adapter_versions.tenant_id", "adapter_versions.id"]
        ),
        sa.CheckConstraint("number >= 1", name="number"),
    )
    op.create_table(
        "deletion_receipts",
        tenant_id(),
        sa.Column("version_id", ID, primary_key=True),
        sa.Column("adapter_id", ID, nullable=False),
        sa.Column("version_number", sa.Integer(), nullable=False),
        sa.Column("digest", DIGEST, nullable=False),
        sa.Column("requested_at", MOMENT, nullable=False),
        sa.Column("finished_at", MOMENT, nullable=False),
        sa.Column("receipt", sa.JSON()),
        _version_key("version_id"),
        sa.Index(None, "tenant_id", "adapter_id"),
    )


def _version_key(version_id: str, name: str | None = None) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["tenant_id", "adapter_id", version_id], VERSION_ID, name=name)


def _canary_checks(version: str, canary: str) -> tuple[sa.CheckConstraint, ...]:
    """These columns name two versions that share requests, or one and no canary."""
    return (
        sa.CheckConstraint(f"(canary_percent IS NULL) = ({canary} IS NULL)", name="canary"),
        sa.CheckConstraint("canary_percent > 0 AND canary_percent < 100", name="canary_percent"),
        sa.CheckConstraint(f"{canary} <> {version}", name=canary),
    )
