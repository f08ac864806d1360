"""The catalog's tables.

Foreign keys include the tenant (`tenant_id, adapter_id`), so no row can reference another tenant's
row, whatever the code does.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Float,
    ForeignKeyConstraint,
    Index,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column, relationship

from ..base import (
    ID_LENGTH,
    Base,
    JsonObject,
    TenantOwned,
    UtcDateTime,
    new_id,
    state_type,
    utc_now,
)
from ..keys.principal import AUTHOR_LENGTH
from ..names import MAX_NAME_LENGTH
from .states import UploadState, VersionState, WishKind
from .upload_part import UploadPart

SHA256_HEX_LENGTH = 64
DIGEST_LENGTH = len("sha256:") + SHA256_HEX_LENGTH
BASE_ID_LENGTH = 128
REASON_LENGTH = 64

HAS_WHOLE_CANARY = "(canary_percent IS NULL) = ({canary} IS NULL)"
IS_CANARY_PERCENT = "canary_percent > 0 AND canary_percent < 100"

_IS_LIVE = text("state IN ('validated', 'attesting', 'ready')")


class Adapter(TenantOwned, Base):
    """A tenant's named LoRA. The row outlives its versions, so that version numbers are not
    reused."""

    __tablename__ = "adapters"
    __table_args__ = (
        UniqueConstraint("tenant_id", "name"),
        UniqueConstraint("tenant_id", "id"),
        # Deleted names must not slow down the listing of existing ones.
        Index("ix_adapters_tenant_id_is_visible_name", "tenant_id", "is_visible", "name"),
    )

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True, default=new_id)
    name: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH))
    is_visible: Mapped[bool] = mapped_column(default=False)
    """Whether it has a visible version."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)

    versions: Mapped[list[AdapterVersion]] = relationship(
        lazy="raise", viewonly=True, order_by="AdapterVersion.number"
    )
    aliases: Mapped[list[AdapterAlias]] = relationship(
        lazy="raise", viewonly=True, order_by="AdapterAlias.name"
    )


class AdapterVersion(TenantOwned, Base):
    """Immutable weights under a number of their adapter. Only the state and reports change."""

    __tablename__ = "adapter_versions"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        UniqueConstraint("tenant_id", "adapter_id", "number"),
        UniqueConstraint("tenant_id", "adapter_id", "id"),
        UniqueConstraint("tenant_id", "id"),
        CheckConstraint("number >= 1", name="number"),
        CheckConstraint("size_bytes >= 0", name="size_bytes"),
        # The same content is one version of its adapter, unless it was rejected or deleted.
        Index(
            "uq_adapter_versions_live_digest",
            "tenant_id",
            "adapter_id",
            "digest",
            unique=True,
            sqlite_where=_IS_LIVE,
            postgresql_where=_IS_LIVE,
        ),
        Index("ix_adapter_versions_tenant_id_digest", "tenant_id", "digest"),
        Index("ix_adapter_versions_state", "state"),
    )

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True, default=new_id)
    adapter_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    number: Mapped[int]
    digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    """`sha256:…`: with the tenant, the identity of the weights."""
    base_id: Mapped[str] = mapped_column(String(BASE_ID_LENGTH))
    object_sha256: Mapped[str] = mapped_column(String(SHA256_HEX_LENGTH))
    """The digest of the canonical block in the store."""
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    """The size of the canonical block."""
    state: Mapped[VersionState] = mapped_column(
        state_type(VersionState), default=VersionState.VALIDATED
    )
    state_changed_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    reason_code: Mapped[str | None] = mapped_column(String(REASON_LENGTH))
    reason_message: Mapped[str | None] = mapped_column(Text)
    intake_report: Mapped[JsonObject] = mapped_column(JSON)
    attestation_report: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))
    lineage: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))
    """How a fine-tuning job made it; None: it was pushed."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    created_by: Mapped[str | None] = mapped_column(String(AUTHOR_LENGTH))
    """The author of the push, as `Actor.author` formats it."""


class AdapterAlias(TenantOwned, Base):
    """A movable name for a ready version of its adapter, or for two that share its requests."""

    __tablename__ = "adapter_aliases"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "version_id"],
            ["adapter_versions.tenant_id", "adapter_versions.adapter_id", "adapter_versions.id"],
        ),
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "canary_version_id"],
            ["adapter_versions.tenant_id", "adapter_versions.adapter_id", "adapter_versions.id"],
            name="fk_adapter_aliases_canary_version_id_adapter_versions",
        ),
        UniqueConstraint("tenant_id", "adapter_id", "name"),
        CheckConstraint(HAS_WHOLE_CANARY.format(canary="canary_version_id"), name="canary"),
        CheckConstraint(IS_CANARY_PERCENT, name="canary_percent"),
        CheckConstraint("canary_version_id <> version_id", name="canary_version_id"),
    )

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True, default=new_id)
    adapter_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    version_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    canary_version_id: Mapped[str | None] = mapped_column(String(ID_LENGTH))
    """The version that answers `canary_percent` of the requests."""
    canary_percent: Mapped[float | None] = mapped_column(Float)
    canary_limits: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))
    """The fields of `CanaryLimits`; None: the canary is not watched."""
    name: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH))
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now, onupdate=utc_now)

    version: Mapped[AdapterVersion] = relationship(
        lazy="raise",
        viewonly=True,
        primaryjoin="AdapterVersion.id == foreign(AdapterAlias.version_id)",
    )
    canary_version: Mapped[AdapterVersion | None] = relationship(
        lazy="raise",
        viewonly=True,
        primaryjoin="AdapterVersion.id == foreign(AdapterAlias.canary_version_id)",
    )


class AdapterWish(TenantOwned, Base):
    """The wish that a version be on or near the device, until it expires: desired state."""

    __tablename__ = "adapter_wishes"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "version_id"],
            ["adapter_versions.tenant_id", "adapter_versions.adapter_id", "adapter_versions.id"],
        ),
        Index("ix_adapter_wishes_tenant_id_adapter_id", "tenant_id", "adapter_id"),
        Index("ix_adapter_wishes_tenant_id_kind", "tenant_id", "kind"),
        Index("ix_adapter_wishes_expires_at", "expires_at"),
    )

    version_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    kind: Mapped[WishKind] = mapped_column(state_type(WishKind, name="kind"), primary_key=True)
    adapter_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """None: it stays until it is removed."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    created_by: Mapped[str | None] = mapped_column(String(AUTHOR_LENGTH))

    version: Mapped[AdapterVersion] = relationship(
        lazy="raise",
        viewonly=True,
        primaryjoin="AdapterVersion.id == foreign(AdapterWish.version_id)",
    )


class AdapterSampling(TenantOwned, Base):
    """The opt-in to keep samples of an adapter's requests; without a row nothing is kept."""

    __tablename__ = "adapter_sampling"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        CheckConstraint("percent > 0 AND percent <= 100", name="percent"),
        CheckConstraint("days >= 1", name="days"),
    )

    adapter_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    percent: Mapped[float] = mapped_column(Float)
    """The share of the requests."""
    days: Mapped[int]
    """How long a sample is kept."""
    since: Mapped[datetime] = mapped_column(UtcDateTime)
    """Answers that were complete before this are not kept: when sampling was turned on, or all
    samples were deleted."""
    changed_at: Mapped[datetime] = mapped_column(UtcDateTime)
    changed_by: Mapped[str] = mapped_column(String(AUTHOR_LENGTH))
    """The author as `Actor.author` formats it."""


class Upload(TenantOwned, Base):
    """An upload: what its owner declared, and how much has arrived."""

    __tablename__ = "uploads"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "version_id"], ["adapter_versions.tenant_id", "adapter_versions.id"]
        ),
        CheckConstraint("size_bytes >= 1", name="size_bytes"),
        CheckConstraint(
            "received_bytes >= 0 AND received_bytes <= size_bytes", name="received_bytes"
        ),
        Index("ix_uploads_tenant_id_created_at", "tenant_id", "created_at"),
        Index("ix_uploads_tenant_id_sha256_created_at", "tenant_id", "sha256", "created_at"),
        Index(
            "ix_uploads_tenant_id_version_id_created_at", "tenant_id", "version_id", "created_at"
        ),
        Index("ix_uploads_state_updated_at", "state", "updated_at"),
    )

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True, default=new_id)
    adapter_name: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH))
    config_json: Mapped[str] = mapped_column(Text)
    """The adapter's configuration file, as its owner sent it."""
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    """The size of the weights file, as declared."""
    sha256: Mapped[str] = mapped_column(String(SHA256_HEX_LENGTH))
    """The digest of the weights file, as declared."""
    received_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    parts: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    """The received bytes, if they are in the store: the fields of each `UploadPart`, in order. None
    if they are on the disk of the server."""
    aliases: Mapped[list[str]] = mapped_column(JSON)
    """The aliases to set on the version once it is ready."""
    state: Mapped[UploadState] = mapped_column(
        state_type(UploadState), default=UploadState.RECEIVING
    )
    reason_code: Mapped[str | None] = mapped_column(String(REASON_LENGTH))
    reason_message: Mapped[str | None] = mapped_column(Text)
    version_id: Mapped[str | None] = mapped_column(String(ID_LENGTH))
    """The resulting version."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    """When bytes were acknowledged, or the state changed, for the last time."""
    created_by: Mapped[str | None] = mapped_column(String(AUTHOR_LENGTH))
    server_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    """The server that opened it, and that has its bytes unless they are in the store; from the
    examination on, the one that examines it."""

    @property
    def is_in_store(self) -> bool:
        """Whether every server reaches the received bytes."""
        return self.parts is not None

    @property
    def stored_parts(self) -> list[UploadPart]:
        """The received bytes in the store, in order."""
        return [UploadPart(*part) for part in self.parts or ()]
