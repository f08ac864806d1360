"""The history tables: changes of aliases, state transitions and finished deletions.

Rows are never changed, and outlive the adapters that they describe.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import (
    JSON,
    CheckConstraint,
    Float,
    ForeignKeyConstraint,
    Index,
    String,
    Text,
)
from sqlalchemy.orm import Mapped, mapped_column

from ..base import ID_LENGTH, Base, JsonObject, TenantOwned, UtcDateTime, state_type
from ..keys.principal import AUTHOR_LENGTH
from ..names import MAX_NAME_LENGTH
from .models import DIGEST_LENGTH, HAS_WHOLE_CANARY, IS_CANARY_PERCENT, REASON_LENGTH
from .states import AliasAction, VersionState

EVALUATION_ID_LENGTH = 40
_VERSION_NUMBER = [
    "adapter_versions.tenant_id",
    "adapter_versions.adapter_id",
    "adapter_versions.number",
]


class AliasChange(TenantOwned, Base):
    """A change of an alias's target and its author; the latest change is the present target."""

    __tablename__ = "adapter_alias_changes"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "version_number"],
            _VERSION_NUMBER,
            name="fk_adapter_alias_changes_version_number_adapter_versions",
        ),
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "canary_number"],
            _VERSION_NUMBER,
            name="fk_adapter_alias_changes_canary_number_adapter_versions",
        ),
        ForeignKeyConstraint(
            ["adapter_id", "alias", "previous_number"],
            [
                "adapter_alias_changes.adapter_id",
                "adapter_alias_changes.alias",
                "adapter_alias_changes.number",
            ],
            name="fk_adapter_alias_changes_previous_number_adapter_alias_changes",
        ),
        CheckConstraint("number >= 1", name="number"),
        CheckConstraint("previous_number < number", name="previous_number"),
        CheckConstraint("(action = 'remove') = (version_number IS NULL)", name="version_number"),
        CheckConstraint(HAS_WHOLE_CANARY.format(canary="canary_number"), name="canary"),
        CheckConstraint(IS_CANARY_PERCENT, name="canary_percent"),
        CheckConstraint("canary_number <> version_number", name="canary_number"),
    )

    adapter_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    alias: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    """Among the changes of this alias, from one on, in the order in which they happened."""
    action: Mapped[AliasAction] = mapped_column(state_type(AliasAction, name="action"))
    version_number: Mapped[int | None]
    """None: the alias was removed."""
    canary_number: Mapped[int | None]
    canary_percent: Mapped[float | None] = mapped_column(Float)
    canary_limits: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))
    previous_number: Mapped[int | None]
    """The change that a rollback from here restores; None if there is none."""
    changed_at: Mapped[datetime] = mapped_column(UtcDateTime)
    changed_by: Mapped[str | None] = mapped_column(String(AUTHOR_LENGTH))
    """The author as `Actor.author` formats it; None if unknown."""
    reason: Mapped[str | None] = mapped_column(Text)
    """Why the canary ended by itself."""
    evaluation_id: Mapped[str | None] = mapped_column(String(EVALUATION_ID_LENGTH))
    """The evaluation that the alias's gate required."""
    override_reason: Mapped[str | None] = mapped_column(Text)
    """Why it was changed although its gate was not passed."""


class VersionTransition(TenantOwned, Base):
    """A version's transition to a state, with the reason and the time."""

    __tablename__ = "adapter_version_transitions"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "version_id"], ["adapter_versions.tenant_id", "adapter_versions.id"]
        ),
        CheckConstraint("number >= 1", name="number"),
    )

    version_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    """Among the version's transitions, from one on, in the order in which they happened."""
    state: Mapped[VersionState] = mapped_column(state_type(VersionState))
    reason_code: Mapped[str | None] = mapped_column(String(REASON_LENGTH))
    reason_message: Mapped[str | None] = mapped_column(Text)
    at: Mapped[datetime] = mapped_column(UtcDateTime)


class DeletionReceipt(TenantOwned, Base):
    """The record that a version was removed from every tier, with the removed amounts."""

    __tablename__ = "deletion_receipts"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "version_id"],
            ["adapter_versions.tenant_id", "adapter_versions.adapter_id", "adapter_versions.id"],
        ),
        Index("ix_deletion_receipts_tenant_id_adapter_id", "tenant_id", "adapter_id"),
    )

    version_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    adapter_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    version_number: Mapped[int]
    digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    requested_at: Mapped[datetime] = mapped_column(UtcDateTime)
    """When the deletion began: from then on no name resolved to the version."""
    finished_at: Mapped[datetime] = mapped_column(UtcDateTime)
    receipt: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))
    """The amounts removed per tier, as reported by the deletion."""
