"""The audit log's tables: one chain per tenant, and one for the platform."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import JSON, BigInteger, ForeignKey, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from ..base import ID_LENGTH, Base, JsonObject, TenantOwned, UtcDateTime, state_type
from ..keyring import SECRET_ID_LENGTH
from ..keys.principal import ActorKind

ACTION_LENGTH = 64
RESOURCE_LENGTH = 255
NAME_LENGTH = 254
ADDRESS_LENGTH = 45
HASH_LENGTH = 32


class AuditColumns:
    """The columns of an entry. Entries are added and never changed."""

    at: Mapped[datetime] = mapped_column(UtcDateTime)
    actor_kind: Mapped[ActorKind] = mapped_column(state_type(ActorKind, name="actor_kind"))
    actor_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    actor_name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    action: Mapped[str] = mapped_column(String(ACTION_LENGTH))
    """`noun.verb`, such as `key.revoke`."""
    resource: Mapped[str] = mapped_column(String(RESOURCE_LENGTH))
    """The changed resource, by its API name."""
    details: Mapped[JsonObject] = mapped_column(JSON)
    """The changed values; never a secret."""
    request_id: Mapped[str | None] = mapped_column(String(64), index=True)
    address: Mapped[str | None] = mapped_column(String(ADDRESS_LENGTH))
    previous_hash: Mapped[bytes] = mapped_column(LargeBinary(HASH_LENGTH))
    hash: Mapped[bytes] = mapped_column(LargeBinary(HASH_LENGTH))
    """Keyed, over everything above and the previous entry's."""
    secret_id: Mapped[str] = mapped_column(String(SECRET_ID_LENGTH))
    """Of the server's secret that the hash is keyed with."""


class AuditEntry(AuditColumns, TenantOwned, Base):
    """A change within a tenant, by any actor."""

    __tablename__ = "audit_entries"

    tenant_id: Mapped[str] = mapped_column(
        String(ID_LENGTH), ForeignKey("tenants.id"), primary_key=True
    )
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    """From 1 on, without gaps."""


class AuditHead(TenantOwned, Base):
    """Where a tenant's chain ends: without it a cut-off tail would not show."""

    __tablename__ = "audit_heads"

    tenant_id: Mapped[str] = mapped_column(
        String(ID_LENGTH), ForeignKey("tenants.id"), primary_key=True
    )
    number: Mapped[int] = mapped_column(BigInteger)
    hash: Mapped[bytes] = mapped_column(LargeBinary(HASH_LENGTH))


class PlatformAuditEntry(AuditColumns, Base):
    """A change that is no tenant's own: of tenants themselves, operators and their keys."""

    __tablename__ = "platform_audit_entries"

    number: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)


class PlatformAuditHead(Base):
    """Where the platform's chain ends; one row."""

    __tablename__ = "platform_audit_heads"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(BigInteger)
    hash: Mapped[bytes] = mapped_column(LargeBinary(HASH_LENGTH))
