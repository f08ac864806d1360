"""Operators, in tables of their own: no tenant's role or key can ever become one."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from ..base import ID_LENGTH, Base, UtcDateTime, new_id, state_type, utc_now
from ..keys.models import MAX_KEY_NAME_LENGTH
from ..keys.principal import OperatorRole
from ..keys.token import KEY_ID_LENGTH

MAX_OPERATOR_NAME_LENGTH = 64


class Operator(Base):
    """Somebody who runs the platform. Disabled ones stay: the audit log refers to them."""

    __tablename__ = "operators"

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True, default=new_id)
    name: Mapped[str] = mapped_column(String(MAX_OPERATOR_NAME_LENGTH), unique=True)
    role: Mapped[OperatorRole] = mapped_column(state_type(OperatorRole, name="role"))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    disabled_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class OperatorKey(Base):
    """An operator's API key: its id and keyed hash, never its text."""

    __tablename__ = "operator_keys"

    id: Mapped[str] = mapped_column(String(KEY_ID_LENGTH), primary_key=True)
    operator_id: Mapped[str] = mapped_column(String(ID_LENGTH), ForeignKey("operators.id"))
    name: Mapped[str] = mapped_column(String(MAX_KEY_NAME_LENGTH))
    mac: Mapped[bytes] = mapped_column(LargeBinary(32))
    """HMAC-SHA256 of the key's whole text under the server's pepper."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    last_used_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """To the hour."""
