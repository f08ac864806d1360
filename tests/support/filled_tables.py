"""Rows for every table, made from the models: row `i` of one refers to row `i` of the others."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Connection,
    Date,
    Enum,
    Float,
    Integer,
    LargeBinary,
    String,
    Table,
)

from loraplex.platform.base import UtcDateTime
from loraplex.platform.models import Base

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
LEFT_EMPTY = frozenset(
    {"canary_version_id", "canary_percent", "canary_number", "previous_number", "successor_id"}
)
"""What is together or not at all, and other than what stands beside it."""


def fill_tables(connection: Connection, num_rows: int) -> None:
    """Put this many rows into each table, parents first."""
    for table in Base.metadata.sorted_tables:
        connection.execute(table.insert(), [row_of(table, number) for number in range(num_rows)])


def row_of(table: Table, number: int) -> dict[str, Any]:
    """The table's row of this number."""
    return {column.name: _value(column, number) for column in table.columns}


def _value(column: Column[Any], number: int) -> Any:
    for key in column.foreign_keys:
        target = key.column
        if column.name in LEFT_EMPTY:
            return None
        if target.table is not column.table:
            return _value(target, number)
    kind = column.type
    if column.name in LEFT_EMPTY:
        return None
    match kind:
        case Enum():
            return list(kind.enum_class)[number % len(kind.enums)]  # type: ignore[arg-type]
        case Boolean():
            return number % 2 == 0
        case Float():
            return number + 0.5
        case Integer():
            return number + 1
        case UtcDateTime():
            return BEGIN + timedelta(seconds=number)
        case Date():
            return date(2000, 1, 1) + timedelta(days=number)
        case LargeBinary():
            return number.to_bytes(32, "big")
        case JSON():
            return {"number": number}
        case String():
            return f"{number:08}"
    raise AssertionError(f"no value for {column}")
