"""The tables of operators, separate so that no tenant's role or key can become an operator's."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from ..base import ID_LENGTH, Base, UtcDateTime, new_id, state_type, utc_now
from ..keys.principal import OperatorRole
from ..keys.stored_key import StoredKey

MAX_OPERATOR_NAME_LENGTH = 64


class Operator(Base):
    """A person who runs the platform. Disabled operators are kept, because the audit log refers to
    them."""

    __tablename__ = "operators"

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True, default=new_id)
    name: Mapped[str] = mapped_column(String(MAX_OPERATOR_NAME_LENGTH), unique=True)
    role: Mapped[OperatorRole] = mapped_column(state_type(OperatorRole, name="role"))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    disabled_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class OperatorKey(StoredKey, Base):
    """An operator's API key."""

    __tablename__ = "operator_keys"

    operator_id: Mapped[str] = mapped_column(String(ID_LENGTH), ForeignKey("operators.id"))
