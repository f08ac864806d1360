"""Inserts or updates rows with one plain statement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import inspect
from sqlalchemy.dialects import postgresql, sqlite

from .base import Base

_INSERTS: dict[str, Callable[..., Any]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}


def insert_into(table: type[Base], dialect: str) -> Any:
    """The dialect's own INSERT, which knows `on_conflict_do_…`; asks for nothing back."""
    return _INSERTS[dialect](table.__table__).inline()


def primary_key(table: type[Base]) -> list[str]:
    """The columns that identify an existing row."""
    return [column.name for column in inspect(table).primary_key]
