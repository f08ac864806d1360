"""People, quotas, roll-ups, the request and audit logs, upkeep: what makes it a platform."""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op
from sqlalchemy.exc import ProgrammingError

from loraplex.platform.errors import RowSecurityMissing

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)
TENANT_TABLES = (
    "adapter_alias_changes",
    "adapter_aliases",
    "adapter_version_transitions",
    "adapter_versions",
    "adapter_wishes",
    "adapters",
    "api_keys",
    "audit_entries",
    "audit_heads",
    "deletion_receipts",
    "period_uses",
    "quotas",
    "rate_buckets",
    "request_log",
    "reservations",
    "uploads",
    "usage_days",
    "usage_records",
    "users",
)
EARLIER_SCOPES = frozenset({"infer", "adapters:read", "adapters:write", "usage:read"})
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
    _create_people()
    _extend_keys()
    _weigh_tenants()
    _place_uploads()
    _extend_usage()
    _create_usage_days()
    _sum_usage_so_far()
    _create_quotas()
    _create_request_log()
    _create_audit_log()
    _create_upkeep()
    if op.get_bind().dialect.name == "postgresql":
        _make_tenant_role()
        _secure_rows()


def downgrade() -> None:
    """Go back. Users, operators, quotas and logs are lost; the ledger stays.

    So do keys, without what is not known there: see `_narrow_keys`.
    """
    if op.get_bind().dialect.name == "postgresql":
        _unsecure_rows()
    for name in (
        "servers",
        "job_leases",
        "idempotent_answers",
        "platform_audit_heads",
        "platform_audit_entries",
        "audit_heads",
        "audit_entries",
        "request_log",
        "usage_days",
        "reservations",
        "period_uses",
        "rate_buckets",
        "quotas",
    ):
        op.drop_table(name)
    with op.batch_alter_table("uploads") as table:
        table.drop_column("server_id")
    with op.batch_alter_table("usage_records") as table:
        table.drop_column("load_ms")
        table.drop_column("key_id")
    with op.batch_alter_table("tenants") as table:
        table.drop_constraint(op.f("ck_tenants_weight"), type_="check")
        table.drop_column("weight")
    _narrow_keys()
    with op.batch_alter_table("api_keys") as table:
        for target in ("users", "api_keys"):
            table.drop_constraint(f"fk_api_keys_tenant_id_{target}", type_="foreignkey")
        for column in ("created_by", "successor_id", "networks", "adapters", "user_id"):
            table.drop_column(column)
        table.drop_column("secret_id")
    for name in ("operator_keys", "operators", "users"):
        op.drop_table(name)


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


def _unsecure_rows() -> None:
    for table in (*TENANT_TABLES, "tenants"):
        op.execute(f"DROP POLICY tenant ON {table}")
        op.execute(f"REVOKE ALL ON {table} FROM loraplex_tenant")
        op.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
    op.execute("DROP POLICY tenant_lock ON tenants")


def _extend_keys() -> None:
    with op.batch_alter_table("api_keys") as table:
        table.add_column(sa.Column("secret_id", sa.String(8), nullable=True))
        table.add_column(sa.Column("user_id", sa.String(36), nullable=True))
        table.add_column(sa.Column("adapters", sa.JSON(none_as_null=True), nullable=True))
        table.add_column(sa.Column("networks", sa.JSON(none_as_null=True), nullable=True))
        table.add_column(sa.Column("successor_id", sa.String(12), nullable=True))
        table.add_column(sa.Column("created_by", sa.String(64), nullable=True))
        table.create_foreign_key(
            "fk_api_keys_tenant_id_users",
            "users",
            ["tenant_id", "user_id"],
            ["tenant_id", "id"],
        )
        table.create_foreign_key(
            "fk_api_keys_tenant_id_api_keys",
            "api_keys",
            ["tenant_id", "successor_id"],
            ["tenant_id", "id"],
        )


def _narrow_keys() -> None:
    """No key may do more than before, nor stand in the way by scopes that are not known.

    Earlier software sees no restriction to adapters, networks or a user's role: such keys end.
    """
    bind = op.get_bind()
    restricted = "adapters IS NOT NULL OR networks IS NOT NULL OR user_id IS NOT NULL"
    now = sa.bindparam("now", datetime.now(UTC), MOMENT)
    end = f"UPDATE api_keys SET revoked_at = :now WHERE revoked_at IS NULL AND ({restricted})"
    bind.execute(sa.text(end).bindparams(now))
    keys = sa.table("api_keys", sa.column("id", sa.String), sa.column("scopes", sa.JSON))
    for key_id, scopes in bind.execute(sa.select(keys.c.id, keys.c.scopes)).all():
        known = [scope for scope in scopes if scope in EARLIER_SCOPES]
        if known != scopes:
            bind.execute(keys.update().where(keys.c.id == key_id).values(scopes=known))


def _place_uploads() -> None:
    with op.batch_alter_table("uploads") as table:
        table.add_column(sa.Column("server_id", sa.String(36), nullable=True))


def _weigh_tenants() -> None:
    with op.batch_alter_table("tenants") as table:
        table.add_column(sa.Column("weight", sa.Double(), nullable=False, server_default="1.0"))
        table.create_check_constraint(op.f("ck_tenants_weight"), sa.text("weight > 0"))
    with op.batch_alter_table("tenants") as table:
        table.alter_column("weight", existing_type=sa.Double(), server_default=None)


def _extend_usage() -> None:
    with op.batch_alter_table("usage_records") as table:
        table.add_column(sa.Column("key_id", sa.String(12), nullable=True))
        table.add_column(sa.Column("load_ms", sa.Double(), nullable=True))


def _create_people() -> None:
    op.create_table(
        "users",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("email", sa.String(254), nullable=False),
        sa.Column(
            "role",
            sa.Enum(
                "owner",
                "developer",
                "viewer",
                name="role",
                native_enum=False,
                create_constraint=True,
                length=16,
            ),
            nullable=False,
        ),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("disabled_at", MOMENT, nullable=True),
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_users_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("tenant_id", "email", name=op.f("uq_users_tenant_id_email")),
        sa.UniqueConstraint("tenant_id", "id", name=op.f("uq_users_tenant_id_id")),
    )
    op.create_table(
        "operators",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column(
            "role",
            sa.Enum(
                "admin", "viewer", name="role", native_enum=False, create_constraint=True, length=16
            ),
            nullable=False,
        ),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("disabled_at", MOMENT, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_operators")),
        sa.UniqueConstraint("name", name=op.f("uq_operators_name")),
    )
    op.create_table(
        "operator_keys",
        sa.Column("id", sa.String(12), nullable=False),
        sa.Column("operator_id", sa.String(36), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("mac", sa.LargeBinary(32), nullable=False),
        sa.Column("secret_id", sa.String(8), nullable=True),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("expires_at", MOMENT, nullable=True),
        sa.Column("revoked_at", MOMENT, nullable=True),
        sa.Column("last_used_at", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(
            ["operator_id"], ["operators.id"], name=op.f("fk_operator_keys_operator_id_operators")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_operator_keys")),
    )


def _create_quotas() -> None:
    op.create_table(
        "quotas",
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.Column("input_tokens_per_minute", sa.Integer(), nullable=True),
        sa.Column("output_tokens_per_minute", sa.Integer(), nullable=True),
        sa.Column("concurrent_requests", sa.Integer(), nullable=True),
        sa.Column("tokens_per_period", sa.BigInteger(), nullable=True),
        sa.Column(
            "period",
            sa.Enum(
                "day", "month", name="period", native_enum=False, create_constraint=True, length=16
            ),
            nullable=False,
        ),
        sa.Column("adapters", sa.Integer(), nullable=True),
        sa.Column("versions_per_adapter", sa.Integer(), nullable=True),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=True),
        sa.Column("keys", sa.Integer(), nullable=True),
        sa.Column("users", sa.Integer(), nullable=True),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_quotas_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_quotas")),
    )
    op.create_table(
        "rate_buckets",
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column(
            "kind",
            sa.Enum(
                "requests",
                "input_tokens",
                "output_tokens",
                name="kind",
                native_enum=False,
                create_constraint=True,
                length=16,
            ),
            nullable=False,
        ),
        sa.Column("level", sa.Double(), nullable=False),
        sa.Column("clock", sa.String(64), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_rate_buckets_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "kind", name=op.f("pk_rate_buckets")),
    )
    op.create_table(
        "period_uses",
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column(
            "period",
            sa.Enum(
                "day", "month", name="period", native_enum=False, create_constraint=True, length=16
            ),
            nullable=False,
        ),
        sa.Column("begins_at", MOMENT, nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_period_uses_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "period", "begins_at", name=op.f("pk_period_uses")),
    )
    op.create_table(
        "reservations",
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("server_id", sa.String(36), nullable=False),
        sa.Column("key_id", sa.String(12), nullable=True),
        sa.Column("adapter_name", sa.String(64), nullable=True),
        sa.Column("adapter_version", sa.Integer(), nullable=True),
        sa.Column("adapter_digest", sa.String(71), nullable=True),
        sa.Column("input_tokens", sa.Integer(), nullable=False),
        sa.Column("output_tokens", sa.Integer(), nullable=False),
        sa.Column("paid_input_tokens", sa.Integer(), nullable=False),
        sa.Column("paid_output_tokens", sa.Integer(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("clock", sa.String(64), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.CheckConstraint(
            "input_tokens >= 0 AND output_tokens >= 0", name=op.f("ck_reservations_tokens")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_reservations_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_reservations")),
    )
    op.create_index("ix_reservations_server_id", "reservations", ["server_id"])
    op.create_index("ix_reservations_tenant_id", "reservations", ["tenant_id"])


def _create_usage_days() -> None:
    op.create_table(
        "usage_days",
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("adapter_name", sa.String(64), nullable=False),
        sa.Column("adapter_version", sa.Integer(), nullable=False),
        sa.Column("num_requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_cold_loads", sa.BigInteger(), nullable=False),
        sa.Column("residency_byte_seconds", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_usage_days_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint(
            "tenant_id", "day", "adapter_name", "adapter_version", name=op.f("pk_usage_days")
        ),
    )


def _sum_usage_so_far() -> None:
    """What the ledger has from before there were sums: nobody waited for a load that is known."""
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    day = "date(created_at)" if is_sqlite else "CAST(created_at AT TIME ZONE 'UTC' AS date)"
    op.execute(
        "INSERT INTO usage_days (tenant_id, day, adapter_name, adapter_version, num_requests,"
        " prompt_tokens, cached_tokens, completion_tokens, num_cold_loads, residency_byte_seconds)"
        f" SELECT tenant_id, {day}, coalesce(adapter_name, ''), coalesce(adapter_version, 0),"
        " count(*), sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens), 0, 0"
        " FROM usage_records GROUP BY 1, 2, 3, 4"
    )


def _create_request_log() -> None:
    op.create_table(
        "request_log",
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("key_id", sa.String(12), nullable=True),
        sa.Column("route", sa.String(64), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("error_code", sa.String(64), nullable=True),
        sa.Column("model", sa.String(200), nullable=True),
        sa.Column("adapter_name", sa.String(64), nullable=True),
        sa.Column("adapter_version", sa.Integer(), nullable=True),
        sa.Column("finish_reason", sa.String(32), nullable=True),
        sa.Column("tier", sa.String(16), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=True),
        sa.Column("cached_tokens", sa.Integer(), nullable=True),
        sa.Column("completion_tokens", sa.Integer(), nullable=True),
        sa.Column("queue_ms", sa.Double(), nullable=True),
        sa.Column("adapter_wait_ms", sa.Double(), nullable=True),
        sa.Column("load_ms", sa.Double(), nullable=True),
        sa.Column("first_token_ms", sa.Double(), nullable=True),
        sa.Column("total_ms", sa.Double(), nullable=False),
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_request_log_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_request_log")),
    )
    op.create_index("ix_request_log_created_at", "request_log", ["created_at"])
    op.create_index(
        "ix_request_log_tenant_id_created_at_request_id",
        "request_log",
        ["tenant_id", "created_at", "request_id"],
    )


def _create_audit_log() -> None:
    op.create_table(
        "audit_entries",
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.Column(
            "actor_kind",
            sa.Enum(
                "operator",
                "user",
                "key",
                "system",
                name="actor_kind",
                native_enum=False,
                create_constraint=True,
                length=16,
            ),
            nullable=False,
        ),
        sa.Column("actor_id", sa.String(36), nullable=False),
        sa.Column("actor_name", sa.String(254), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("resource", sa.String(255), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("request_id", sa.String(64), nullable=True),
        sa.Column("address", sa.String(45), nullable=True),
        sa.Column("previous_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("hash", sa.LargeBinary(32), nullable=False),
        sa.Column("secret_id", sa.String(8), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_audit_entries_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "number", name=op.f("pk_audit_entries")),
    )
    op.create_index("ix_audit_entries_request_id", "audit_entries", ["request_id"])
    op.create_table(
        "audit_heads",
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("hash", sa.LargeBinary(32), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_audit_heads_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_audit_heads")),
    )
    op.create_table(
        "platform_audit_entries",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.Column(
            "actor_kind",
            sa.Enum(
                "operator",
                "user",
                "key",
                "system",
                name="actor_kind",
                native_enum=False,
                create_constraint=True,
                length=16,
            ),
            nullable=False,
        ),
        sa.Column("actor_id", sa.String(36), nullable=False),
        sa.Column("actor_name", sa.String(254), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("resource", sa.String(255), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("request_id", sa.String(64), nullable=True),
        sa.Column("address", sa.String(45), nullable=True),
        sa.Column("previous_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("hash", sa.LargeBinary(32), nullable=False),
        sa.Column("secret_id", sa.String(8), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_platform_audit_entries")),
    )
    op.create_index(
        "ix_platform_audit_entries_request_id", "platform_audit_entries", ["request_id"]
    )
    op.create_table(
        "platform_audit_heads",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("hash", sa.LargeBinary(32), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_platform_audit_heads")),
    )


def _create_upkeep() -> None:
    op.create_table(
        "idempotent_answers",
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("request_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("server_id", sa.String(36), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("answer", sa.LargeBinary(), nullable=True),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("owner", "key", name=op.f("pk_idempotent_answers")),
    )
    op.create_index("ix_idempotent_answers_created_at", "idempotent_answers", ["created_at"])
    op.create_table(
        "job_leases",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("server_id", sa.String(36), nullable=True),
        sa.Column("expires_at", MOMENT, nullable=True),
        sa.Column("finished_at", MOMENT, nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_job_leases")),
    )
    op.create_table(
        "servers",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("version", sa.String(32), nullable=False),
        sa.Column("base_id", sa.String(128), nullable=False),
        sa.Column("started_at", MOMENT, nullable=False),
        sa.Column("seen_at", MOMENT, nullable=False),
        sa.Column("stopped_at", MOMENT, nullable=True),
        sa.Column("evicted_at", MOMENT, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_servers")),
    )
