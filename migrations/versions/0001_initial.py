"""The whole schema, and on PostgreSQL the row-level security of tenants' tables.

Constraints and indexes that are given no name are named by the convention of `platform/base.py`.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.exc import ProgrammingError

from loraplex.migrations.initial import catalog, metering, people, upkeep
from loraplex.platform.errors import RowSecurityMissing

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TENANT_TABLES = (
    "users",
    "api_keys",
    "adapters",
    "adapter_versions",
    "adapter_aliases",
    "adapter_wishes",
    "uploads",
    "adapter_alias_changes",
    "adapter_version_transitions",
    "deletion_receipts",
    "quotas",
    "rate_buckets",
    "period_uses",
    "reservations",
    "usage_records",
    "usage_days",
    "request_log",
    "audit_entries",
    "audit_heads",
    "accounts",
    "account_sessions",
    "tenant_samples",
    "adapter_uses",
)
"""Each after those that it refers to."""
PLATFORM_TABLES = (
    "operators",
    "operator_keys",
    "platform_audit_entries",
    "platform_audit_heads",
    "sign_in_failures",
    "server_samples",
    "server_memories",
    "servers",
    "replicas",
    "job_leases",
    "idempotent_answers",
)

_MAKE_ROLE = """
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'loraplex_tenant') THEN
        CREATE ROLE loraplex_tenant NOLOGIN;
    END IF;
    IF NOT pg_has_role(current_user, 'loraplex_tenant', 'MEMBER') THEN
        EXECUTE format('GRANT loraplex_tenant TO %I', current_user);
    END IF;
EXCEPTION
    WHEN duplicate_object OR unique_violation THEN NULL;  -- another migrator was faster
END $$
"""


def upgrade() -> None:
    """Go forward."""
    for part in (people, catalog, metering, upkeep):
        part.create_tables()
    if op.get_bind().dialect.name == "postgresql":
        _make_tenant_role()
        _secure_rows()


def downgrade() -> None:
    """Go back. The role of tenants' transactions stays: it belongs to the whole server."""
    for table in (*reversed(TENANT_TABLES), *reversed(PLATFORM_TABLES), "tenants"):
        op.drop_table(table)


def _make_tenant_role() -> None:
    """The role of tenants' transactions. It belongs to the whole server, so it may be there."""
    bind = op.get_bind()
    try:
        with bind.begin_nested():
            bind.execute(sa.text(_MAKE_ROLE))
        with bind.begin_nested():
            bind.execute(sa.text("SET LOCAL ROLE loraplex_tenant"))
            bind.execute(sa.text("SET LOCAL ROLE NONE"))
    except ProgrammingError as exc:
        raise RowSecurityMissing from exc


def _secure_rows() -> None:
    """Let the role see and write rows of the tenant that its transaction names, and no others.

    The tables' owner is not concerned: it is who migrates, backs up and does the platform's work.
    """
    own = "tenant_id = (SELECT current_setting('app.tenant', true))"
    for table in TENANT_TABLES:
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(
            f"CREATE POLICY tenant ON {table} TO loraplex_tenant USING ({own}) WITH CHECK ({own})"
        )
        op.execute(f"GRANT SELECT, INSERT ON {table} TO loraplex_tenant")
        if table != "audit_entries":
            op.execute(f"GRANT UPDATE, DELETE ON {table} TO loraplex_tenant")
    # Of the tenants' table it sees its own row and may lock it, but change nothing.
    own = "id = (SELECT current_setting('app.tenant', true))"
    op.execute("ALTER TABLE tenants ENABLE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY tenant ON tenants FOR SELECT TO loraplex_tenant USING ({own})")
    op.execute(
        "CREATE POLICY tenant_lock ON tenants FOR UPDATE TO loraplex_tenant "
        f"USING ({own}) WITH CHECK (false)"
    )
    op.execute("GRANT SELECT, UPDATE ON tenants TO loraplex_tenant")
