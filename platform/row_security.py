"""PostgreSQL row-level security, the second separation between tenants.

A tenant's transaction runs as the role `loraplex_tenant` and sets its tenant. The database then
restricts reads and writes to that tenant's rows, whatever the SQL. Both settings end with the
transaction, so nothing remains on a pooled connection. SQLite has no equivalent.
"""

from __future__ import annotations

from sqlalchemy import Connection
from sqlalchemy.exc import DataError, ProgrammingError

from .errors import RowSecurityMissing

TENANT_ROLE = "loraplex_tenant"
"""Created by the migrations; it cannot log in and owns nothing."""
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
    except (DataError, ProgrammingError) as exc:  # the role does not exist, or may not be used
        raise RowSecurityMissing from exc
    finally:
        connection.rollback()
