"""The second fence between tenants, on PostgreSQL: row-level security.

A tenant's transaction runs as the role `loraplex_tenant` and says which tenant it is for; the
database then shows it and lets it write that tenant's rows alone, whatever the SQL. Both hold until
the transaction ends, so nothing is left on a pooled connection. SQLite has no such thing.
"""

from __future__ import annotations

from sqlalchemy import Connection
from sqlalchemy.exc import DataError, ProgrammingError

from .errors import RowSecurityMissing

TENANT_ROLE = "loraplex_tenant"
"""Made by the migrations; it cannot log in and owns nothing."""
TENANT_SETTING = "app.tenant"


def confine(connection: Connection, tenant_id: str) -> None:
    """Show this transaction the rows of one tenant, until it ends."""
    if connection.dialect.name != "postgresql":
        return
    connection.exec_driver_sql(
        "SELECT set_config('role', %s, true), set_config(%s, %s, true)",
        (TENANT_ROLE, TENANT_SETTING, tenant_id),
    )


def check_role(connection: Connection) -> None:
    """Raise RowSecurityMissing unless tenants' transactions can be confined."""
    try:
        confine(connection, "")
    except (DataError, ProgrammingError) as exc:  # the role is not there, or not ours
        raise RowSecurityMissing from exc
    finally:
        connection.rollback()
