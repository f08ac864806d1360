"""The table of a tenant's users."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from ..base import ID_LENGTH, Base, TenantOwned, UtcDateTime, new_id, state_type, utc_now
from ..keys.principal import TenantRole

MAX_EMAIL_LENGTH = 254


class User(TenantOwned, Base):
    """A user of a tenant. Disabled users are kept, because other rows refer to them."""

    __tablename__ = "users"
    __table_args__ = (UniqueConstraint("tenant_id", "id"), UniqueConstraint("tenant_id", "email"))

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True, default=new_id)
    email: Mapped[str] = mapped_column(String(MAX_EMAIL_LENGTH))
    """In lower case."""
    role: Mapped[TenantRole] = mapped_column(state_type(TenantRole, name="role"))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    disabled_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
