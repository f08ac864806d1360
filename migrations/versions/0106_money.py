"""Prices, amounts in the ledger, budgets, and limits of users and keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraplex.migrations.initial.columns import ID, MOMENT, one_of, tenant_id

revision = "0106"
down_revision = "0105"
branch_labels = None
depends_on = None

TENANT_TABLES = ("caller_limits", "caller_buckets", "budgets", "budget_uses", "budget_alerts")

_HOLDER = sa.String(41)


def upgrade() -> None:
    """Go forward."""
    _create_prices()
    _create_caller_tables()
    _create_budgets()
    for name in ("has_budgets", "has_caller_limits"):
        op.add_column(
            "quotas", sa.Column(name, sa.Boolean(), nullable=False, server_default=sa.false())
        )
    op.add_column("reservations", sa.Column("user_id", ID))
    op.add_column("usage_records", sa.Column("user_id", ID))
    op.add_column("usage_records", sa.Column("price_id", sa.Integer()))
    for table in ("reservations", "usage_records", "usage_days"):
        op.add_column(table, _amount(server_default=sa.text("0")))
    if op.get_bind().dialect.name == "postgresql":
        _secure_rows()


def downgrade() -> None:
    """Go back."""
    for table in ("reservations", "usage_records", "usage_days"):
        op.drop_column(table, "amount")
    op.drop_column("usage_records", "price_id")
    op.drop_column("usage_records", "user_id")
    op.drop_column("reservations", "user_id")
    for name in ("has_budgets", "has_caller_limits"):
        op.drop_column("quotas", name)
    for table in (*reversed(TENANT_TABLES), "prices", "currency"):
        op.drop_table(table)


def _create_prices() -> None:
    op.create_table(
        "currency",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("code", sa.String(3), nullable=False),
    )
    op.create_table(
        "prices",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("base", sa.String(255), nullable=False),
        tenant_id(nullable=True),
        *(_amount(name) for name in ("prompt", "cached", "completion")),
        sa.Column("batch_discount", sa.Integer(), nullable=False),
        sa.Column("effective_from", MOMENT, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.CheckConstraint(
            "prompt >= 0 AND cached >= 0 AND cached <= prompt AND completion >= 0", name="amounts"
        ),
        sa.Index("ix_prices_base_effective_from", "base", "effective_from"),
    )


def _create_caller_tables() -> None:
    op.create_table(
        "caller_limits",
        tenant_id(primary_key=True),
        sa.Column("holder", _HOLDER, primary_key=True),
        sa.Column("requests_per_minute", sa.Integer()),
        sa.Column("input_tokens_per_minute", sa.Integer()),
        sa.Column("output_tokens_per_minute", sa.Integer()),
        sa.Column("concurrent_requests", sa.Integer()),
        sa.Column("updated_at", MOMENT, nullable=False),
    )
    op.create_table(
        "caller_buckets",
        tenant_id(primary_key=True),
        sa.Column("holder", _HOLDER, primary_key=True),
        one_of("kind", "requests", "input_tokens", "output_tokens", primary_key=True),
        sa.Column("level", sa.Double(), nullable=False),
        sa.Column("clock", sa.String(64), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
    )


def _create_budgets() -> None:
    op.create_table(
        "budgets",
        *_budget_key(),
        _amount(),
        sa.Column("alert_percents", sa.JSON(), nullable=False),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.CheckConstraint("amount >= 0", name="amount"),
    )
    op.create_table(
        "budget_uses",
        *_budget_key(),
        sa.Column("begins_at", MOMENT, primary_key=True),
        _amount(),
    )
    op.create_table(
        "budget_alerts",
        *_budget_key(),
        sa.Column("begins_at", MOMENT, primary_key=True),
        sa.Column("percent", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("budget", sa.BigInteger(), primary_key=True, autoincrement=False),
        _amount("spent"),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("announced_at", MOMENT),
        sa.Index("ix_budget_alerts_announced_at", "announced_at"),
    )


def _budget_key() -> list[sa.Column[str]]:
    """Whose budget it is, and of which period."""
    return [
        tenant_id(primary_key=True),
        sa.Column("holder", _HOLDER, primary_key=True),
        one_of("period", "day", "month", primary_key=True),
    ]


def _amount(name: str = "amount", server_default: sa.TextClause | None = None) -> sa.Column[int]:
    """An amount of money, in 1e-9 of the currency's unit."""
    return sa.Column(name, sa.BigInteger(), nullable=False, server_default=server_default)


def _secure_rows() -> None:
    """Let a tenant's transaction see and write its own rows only, as in the first revision."""
    own = "tenant_id = (SELECT current_setting('app.tenant', true))"
    for table in TENANT_TABLES:
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(
            f"CREATE POLICY tenant ON {table} TO loraplex_tenant USING ({own}) WITH CHECK ({own})"
        )
        op.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO loraplex_tenant")
