"""The SQL statements of a unit of work, their plans, and the rows they read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from sqlalchemy import event
from sqlalchemy.orm import Session


class Statement(NamedTuple):
    """One statement as the driver got it."""

    text: str
    parameters: Any

    @property
    def is_select(self) -> bool:
        return self.text.lstrip().upper().startswith("SELECT")


@contextmanager
def recorded_statements(session: Session) -> Iterator[list[Statement]]:
    """The statements that the session runs meanwhile."""
    statements: list[Statement] = []

    def record(
        connection: object, cursor: object, text: str, parameters: Any, *rest: object
    ) -> None:
        statements.append(Statement(text, parameters))

    connection = session.connection()
    event.listen(connection, "before_cursor_execute", record)
    try:
        yield statements
    finally:
        event.remove(connection, "before_cursor_execute", record)


@contextmanager
def counted_steps(session: Session) -> Iterator[list[int]]:
    """How many instructions SQLite's machine runs meanwhile, as the only number of a list.

    It runs some for each row that it looks at, whether or not it returns it.
    """
    steps = [0]

    def count() -> None:
        steps[0] += 1

    connection: Any = session.connection().connection.driver_connection
    connection.set_progress_handler(count, 1)
    try:
        yield steps
    finally:
        connection.set_progress_handler(None, 0)


def sqlite_plan(session: Session, statement: Statement) -> list[str]:
    """How SQLite goes about it: a line for each table and for each sorting."""
    explained = session.connection().exec_driver_sql(
        f"EXPLAIN QUERY PLAN {statement.text}", statement.parameters
    )
    return [row.detail for row in explained]


def num_rows_read_by_postgres(session: Session, statement: Statement) -> int:
    """How many rows of tables PostgreSQL looks at for it, those that it throws away included."""
    explained = session.connection().exec_driver_sql(
        f"EXPLAIN (ANALYZE, FORMAT JSON) {statement.text}", statement.parameters
    )
    plan = explained.scalar_one()
    (root,) = json.loads(plan) if isinstance(plan, str) else plan
    return sum(_rows_of_scans(root["Plan"]))


def _rows_of_scans(node: dict[str, Any]) -> Iterator[int]:
    if "Relation Name" in node:
        thrown_away = node.get("Rows Removed by Filter", 0)
        yield round((node["Actual Rows"] + thrown_away) * node["Actual Loops"])
    for child in node.get("Plans", ()):
        yield from _rows_of_scans(child)
