"""Rows for every table, from the models: row `i` of one refers to row `i` of the others."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Date,
    Enum,
    Float,
    Integer,
    LargeBinary,
    String,
    Table,
    cast,
    literal,
    select,
)

from loraplex.platform.base import UtcDateTime
from loraplex.platform.models import Base

LEFT_EMPTY = frozenset(
    {
        *("canary_version_id", "canary_percent", "canary_number", "canary_limits"),
        *("previous_number", "successor_id"),
    }
)
"""What is together or not at all, and other than what stands beside it."""


def fill_tables(connection: Connection, num_rows: int) -> None:
    """Put this many rows into each table, parents first; the database itself makes them."""
    for table in Base.metadata.sorted_tables:
        first = select(literal(0).label("number")).cte("numbers", recursive=True)
        number = first.c.number
        numbers = first.union_all(select(number + 1).where(number < num_rows - 1))
        values = [_expression(column, numbers.c.number) for column in table.columns]
        names = [column.name for column in table.columns]
        connection.execute(table.insert().from_select(names, select(*values)))


def row_of(table: Table, number: int) -> dict[str, Any]:
    """The table's row of this number."""
    return {column.name: _value(column, number) for column in table.columns}


def _expression(column: Column[Any], number: ColumnElement[int]) -> ColumnElement[Any]:
    value = _value(column, 0)
    match value:
        case None:
            return literal(None, column.type)
        case str() if not isinstance(column.type, Enum):
            return cast(number, String)
        case int() if not isinstance(column.type, Boolean):
            return number + 1
    return literal(value, column.type)


def _value(column: Column[Any], number: int) -> Any:
    if column.name in LEFT_EMPTY:
        return None
    match column.type:
        case Enum() as kind:
            return next(iter(kind.enum_class))  # type: ignore[arg-type]
        case Boolean():
            return True
        case Float():
            return 0.5
        case Integer():
            return number + 1
        case UtcDateTime():
            return datetime(2026, 1, 1, tzinfo=UTC)
        case Date():
            return date(2026, 1, 1)
        case LargeBinary():
            return bytes(32)
        case JSON():
            return ["infer"] if column.name == "scopes" else {"a": 1}
        case String():
            return str(number)
    raise AssertionError(f"no value for {column}")
