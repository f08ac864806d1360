"""Common definitions of all tables: one metadata with named constraints, UTC times, closed enums.

Every constraint has a name derived from its table and columns, so migrations can drop it on any
database.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import DateTime, Dialect, Enum, ForeignKey, MetaData, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

NAMING_CONVENTION = {
    "pk": "pk_%(table_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
}

ID_LENGTH = 36
"""Characters of a UUID."""

JsonObject = dict[str, Any]
"""A report as stored and sent; the control plane does not interpret it."""


class Base(DeclarativeBase):
    """The declarative base of every table."""

    metadata = MetaData(naming_convention=NAMING_CONVENTION)


class TenantOwned:
    """A row that belongs to one tenant. `TenantSession` shows and writes only its own."""

    tenant_id: Mapped[str] = mapped_column(String(ID_LENGTH), ForeignKey("tenants.id"))


class UtcDateTime(TypeDecorator[datetime]):
    """A moment: refused without a time zone, kept and returned in UTC on every database."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a moment without a time zone")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        # SQLite keeps no zone; PostgreSQL answers in the session's.
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def state_type(states: type[StrEnum], *, name: str = "state") -> Enum:
    """The column type of a closed set: its values, guarded by a check constraint of this name."""
    return Enum(
        states,
        name=name,
        native_enum=False,
        create_constraint=True,
        length=16,
        values_callable=lambda members: [member.value for member in members],
    )


def new_id() -> str:
    """A random UUID: the id of tenants, adapters, versions and uploads."""
    return str(uuid.uuid4())


def utc_now() -> datetime:
    """The present moment, with its zone."""
    return datetime.now(UTC)
