"""Plain statements that keep to the rows of the tenant in their parameter `tenant_id`.

SQLite has no row-level security: there the statement itself is all that keeps tenants apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from sqlalchemy import (
    BinaryExpression,
    BindParameter,
    Column,
    ColumnElement,
    Delete,
    Executable,
    FromClause,
    Insert,
    Select,
    SelectBase,
    TextClause,
)
from sqlalchemy.dialects.postgresql.dml import OnConflictDoUpdate as PostgresUpsert
from sqlalchemy.dialects.sqlite.dml import OnConflictDoUpdate as SqliteUpsert
from sqlalchemy.sql import operators, visitors
from sqlalchemy.sql.elements import BooleanClauseList
from sqlalchemy.sql.functions import FunctionElement

TENANT_ID = "tenant_id"
_MAX_STATEMENTS = 256
"""More than there are: each is judged once."""


@lru_cache(_MAX_STATEMENTS)
def is_pinned(statement: Executable) -> bool:
    """The statement reads and writes rows of the tenant `:tenant_id` only.

    It must say so plainly. A row that it adds has this tenant, and an upsert finds the row by it.
    A select or delete has `tenant_id = :tenant_id` among its conditions, for each of its tables.
    Updates, SQL text, joins and subqueries are not understood, so they are not pinned.
    """
    if not isinstance(statement, Select | Insert | Delete):
        return False
    parts = [part for part in visitors.iterate(statement) if part is not statement]
    if any(isinstance(part, SelectBase | TextClause) for part in parts):
        return False
    if isinstance(statement, Insert):
        return _adds_for_tenant(statement) and all(map(_finds_by_tenant, parts))
    tables = set(_tables(parts))
    return bool(tables) and tables <= set(_tables_of_tenant(statement.whereclause))


def _adds_for_tenant(statement: Insert) -> bool:
    if TENANT_ID not in statement.table.c:
        return False
    given = [TENANT_ID, *(column.key for column in statement.table.primary_key)]
    return TENANT_ID in statement.compile(column_keys=given).params


def _finds_by_tenant(part: object) -> bool:
    """False for an upsert that could change another tenant's row."""
    if not isinstance(part, SqliteUpsert | PostgresUpsert):
        return True
    return TENANT_ID in (part.inferred_target_elements or ())


def _tables(parts: Iterable[object]) -> Iterator[FromClause]:
    for part in parts:
        if isinstance(part, FromClause) and not isinstance(part, FunctionElement):
            yield part
        elif isinstance(part, Column):
            yield part.table


def _tables_of_tenant(where: ColumnElement[bool] | None) -> Iterator[FromClause]:
    """The tables that this condition narrows to the tenant."""
    for condition in _conditions(where):
        match condition:
            case BinaryExpression(
                left=Column(name="tenant_id", table=table),
                operator=operators.eq,
                right=BindParameter(key="tenant_id"),
            ):
                yield table


def _conditions(where: ColumnElement[bool] | None) -> Iterable[object]:
    """Those that all have to hold."""
    if isinstance(where, BooleanClauseList) and where.operator is operators.and_:
        return where.clauses
    return (where,)
