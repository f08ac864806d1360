"""The tables of tenants and their deletions."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import JSON, CheckConstraint, ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from ..base import ID_LENGTH, Base, JsonObject, UtcDateTime, new_id, utc_now
from ..names import MAX_SLUG_LENGTH
from .slo import Slo

MAX_DISPLAY_NAME_LENGTH = 200


class Tenant(Base):
    """A customer. The id never changes and is used in all references; the slug is its name."""

    __tablename__ = "tenants"
    __table_args__ = (CheckConstraint("weight > 0", name="weight"),)

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True, default=new_id)
    slug: Mapped[str] = mapped_column(String(MAX_SLUG_LENGTH), unique=True)
    name: Mapped[str | None] = mapped_column(String(MAX_DISPLAY_NAME_LENGTH))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    suspended_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    weight: Mapped[float] = mapped_column(default=1.0)
    """Its share of the device, in proportion to the others'."""
    target_ttft_ms: Mapped[float | None]
    target_itl_ms: Mapped[float | None]
    deleting_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """When its deletion was requested. Nobody finds it by name any more; the row stays, because the
    ledger refers to it."""

    @property
    def slo(self) -> Slo:
        """What its requests are promised."""
        return Slo(self.target_ttft_ms, self.target_itl_ms)

    @property
    def is_suspended(self) -> bool:
        """The tenant's keys are refused."""
        return self.suspended_at is not None


class TenantDeletion(Base):
    """The deletion of a tenant, and its receipt. It outlives everything else of the tenant."""

    __tablename__ = "tenant_deletions"
    __table_args__ = (Index("ix_tenant_deletions_finished_at", "finished_at"),)

    id: Mapped[str] = mapped_column(String(ID_LENGTH), ForeignKey("tenants.id"), primary_key=True)
    """The tenant's."""
    slug: Mapped[str] = mapped_column(String(MAX_SLUG_LENGTH))
    """The name that the tenant had."""
    with_usage: Mapped[bool]
    """The ledger's rows of the tenant are deleted too."""
    requested_at: Mapped[datetime] = mapped_column(UtcDateTime)
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    receipt: Mapped[JsonObject] = mapped_column(JSON)
    """What was removed so far."""
