"""Database sessions: one restricted to a tenant's rows, and one that sees all rows.

The type of the session is the scope: a repository function that takes a `TenantSession` cannot
access rows of two tenants; one that takes a `PlatformSession` states it in its signature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from sqlalchemy import Connection, CursorResult, Engine, Executable, event
from sqlalchemy.orm import (
    ORMExecuteState,
    Session,
    SessionTransaction,
    UOWTransaction,
    with_loader_criteria,
)

from .base import TenantOwned
from .models import Tenant  # from there, so that a module with a session has imported every table
from .pinned_statements import TENANT_ID, is_pinned
from .row_security import confine

Values = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A statement's parameters, or several of them."""
Rows = CursorResult[*tuple[Any, ...]]
Guard = Callable[[Connection], None]
"""Raises an error in a transaction that may not be carried out."""


class Transaction(Protocol):
    """The common interface of sessions and plain statements."""

    @property
    def dialect(self) -> str: ...
    def connection(self) -> Connection: ...


class TenantRows(Transaction, Protocol):
    """The same, of one tenant."""

    def execute_pinned(self, statement: Executable, values: Values) -> Rows: ...


class ScopeViolation(AssertionError):
    """Code tried to reach rows outside the session's scope: a bug, never a caller's mistake."""


class UnitOfWork(Session):
    """One transaction. Services add and change rows; only `Database` commits.

    `guard` is called first in it, before the rows are restricted to a tenant's.
    """

    def __init__(self, engine: Engine, *, read_only: bool, guard: Guard | None = None) -> None:
        super().__init__(engine, expire_on_commit=False)
        self.read_only = read_only
        self.guard = guard
        self._dialect = engine.dialect.name

    @property
    def dialect(self) -> str:
        """`sqlite` or `postgresql`."""
        return self._dialect


class PlatformSession(UnitOfWork):
    """Sees the rows of every tenant: for operators, authentication and recovery."""


class TenantSession(UnitOfWork):
    """Reads and writes the rows of one tenant.

    Every select is restricted to the tenant, including relationships and subqueries. New rows get
    its id. Statements that cannot be restricted (SQL text, Core statements, bulk writes) raise
    ScopeViolation. PostgreSQL restricts the rows too: see `row_security`.
    """

    def __init__(
        self, engine: Engine, *, tenant_id: str, read_only: bool, guard: Guard | None = None
    ) -> None:
        super().__init__(engine, read_only=read_only, guard=guard)
        self.tenant_id = tenant_id

    def execute_pinned(self, statement: Executable, values: Values) -> Rows:
        """Like that of `TenantStatements`. Raises ScopeViolation."""
        if self.read_only and not statement.is_select:
            raise ScopeViolation("this unit of work was opened for reading")
        return TenantStatements(self.connection(), self.tenant_id).execute_pinned(statement, values)


class TenantStatements:
    """A transaction of plain statements on one tenant's rows.

    For the writes of every request, where the ORM's session costs more than the statements.
    PostgreSQL restricts the rows here too.
    """

    def __init__(self, connection: Connection, tenant_id: str) -> None:
        self.tenant_id = tenant_id
        self._connection = connection

    @property
    def dialect(self) -> str:
        """`sqlite` or `postgresql`."""
        return self._connection.dialect.name

    def connection(self) -> Connection:
        """For statements on tables without tenants."""
        return self._connection

    def execute_pinned(self, statement: Executable, values: Values) -> Rows:
        """Run a Core statement that narrows itself by its parameter `tenant_id`, which is set here.

        Once, or for each of several values. Raises ScopeViolation for one that does not.
        """
        if not is_pinned(statement):
            raise ScopeViolation(f"a {type(statement).__name__} that is not narrowed to the tenant")
        sets = [values] if isinstance(values, Mapping) else values
        pinned = [{**each, TENANT_ID: self.tenant_id} for each in sets]
        return self._connection.execute(statement, pinned if len(pinned) > 1 else pinned[0])


@event.listens_for(UnitOfWork, "after_begin", propagate=True)
def _guard_and_confine(
    session: UnitOfWork, transaction: SessionTransaction, connection: Connection
) -> None:
    if transaction.nested:
        return
    if session.guard is not None:
        session.guard(connection)
    if isinstance(session, TenantSession):
        confine(connection, session.tenant_id)


@event.listens_for(TenantSession, "do_orm_execute")
def _narrow_to_tenant(state: ORMExecuteState) -> None:
    session = state.session
    assert isinstance(session, TenantSession)
    if not (state.is_orm_statement and state.is_select):
        raise ScopeViolation("a tenant's session runs ORM selects only")
    tenant_id = session.tenant_id
    state.statement = state.statement.options(
        with_loader_criteria(
            TenantOwned, lambda entity: entity.tenant_id == tenant_id, include_aliases=True
        ),
        with_loader_criteria(Tenant, lambda entity: entity.id == tenant_id, include_aliases=True),
    )


@event.listens_for(TenantSession, "before_flush")
def _pin_tenant(session: TenantSession, context: UOWTransaction, instances: object) -> None:
    for row in (*session.new, *session.dirty, *session.deleted):
        _pin(row, session.tenant_id)


@event.listens_for(UnitOfWork, "before_flush", propagate=True)
def _refuse_writes(session: UnitOfWork, context: UOWTransaction, instances: object) -> None:
    if session.read_only and _has_changes(session):
        raise ScopeViolation("this unit of work was opened for reading")


def _has_changes(session: Session) -> bool:
    changed = any(session.is_modified(row) for row in session.dirty)
    return changed or bool(session.new) or bool(session.deleted)


def _pin(row: Any, tenant_id: str) -> None:
    if not isinstance(row, TenantOwned):
        raise ScopeViolation(f"{type(row).__name__} rows belong to no tenant")
    if row.tenant_id is None:
        row.tenant_id = tenant_id
    if row.tenant_id != tenant_id:
        raise ScopeViolation(f"a {type(row).__name__} of another tenant")
