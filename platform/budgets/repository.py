"""Queries on budgets and on what was spent of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import date, datetime
from functools import cache
from typing import Any, NamedTuple, cast

from sqlalchemy import Executable, bindparam, func, select

from ..keys.models import ApiKey
from ..quotas.holder import Holder, id_of, key_holder, user_holder
from ..quotas.models import Period
from ..sessions import PlatformSession, TenantRows, TenantSession
from ..upserts import insert_into, primary_key
from ..usage.models import TrainingDay, UsageDay, UsageRecord
from ..users.models import User
from .models import Budget, BudgetAlert, BudgetUse


class BudgetRow(NamedTuple):
    """A budget as the database has it."""

    holder: Holder
    period: Period
    amount: int
    alert_percents: Sequence[int]


def find_budget(session: TenantSession, holder: Holder, period: Period) -> Budget | None:
    """The holder's budget of this period."""
    query = select(Budget).where(Budget.holder == holder, Budget.period == period)
    return session.scalars(query.execution_options(populate_existing=True)).one_or_none()


def list_budgets(session: TenantSession, holder: Holder | None = None) -> Sequence[Budget]:
    """The tenant's budgets, those of all holders if none is named, by holder and period."""
    query = select(Budget).order_by(Budget.holder, Budget.period)
    if holder is not None:
        query = query.where(Budget.holder == holder)
    return session.scalars(query).all()


def names_of(session: TenantSession, holders: Collection[Holder]) -> Mapping[Holder, str]:
    """The email addresses of the users and the names of the keys among these holders."""
    ids = [id_of(holder) for holder in holders]
    users = select(User.id, User.email).where(User.id.in_([user for user, _ in ids if user]))
    keys = select(ApiKey.id, ApiKey.name).where(ApiKey.id.in_([key for _, key in ids if key]))
    return {
        **{user_holder(user): email for user, email in session.execute(users)},
        **{key_holder(key): name for key, name in session.execute(keys)},
    }


def has_budget(session: TenantSession) -> bool:
    """Whether any holder of the tenant has a budget."""
    return session.scalars(select(Budget.holder).limit(1)).first() is not None


def rows_of(session: TenantRows, holders: Collection[Holder]) -> Sequence[BudgetRow]:
    """The budgets of these holders."""
    rows = session.execute_pinned(_ROWS_OF, {"holders": list(holders)})
    return [BudgetRow(*row) for row in rows]


_BUDGETS = Budget.__table__
_ROWS_OF = select(*(_BUDGETS.c[name] for name in BudgetRow._fields)).where(
    _BUDGETS.c.tenant_id == bindparam("tenant_id"),
    _BUDGETS.c.holder.in_(bindparam("holders", expanding=True)),
)


def find_use(
    session: TenantSession, holder: Holder, period: Period, begin: datetime
) -> BudgetUse | None:
    """What the holder has spent in the period that began then, as a row."""
    query = select(BudgetUse).where(
        BudgetUse.holder == holder, BudgetUse.period == period, BudgetUse.begins_at == begin
    )
    return session.scalars(query.execution_options(populate_existing=True)).one_or_none()


def spent_in(session: TenantRows, holder: Holder, period: Period, begin: datetime) -> int:
    """What the holder has spent in the period that began then."""
    values = {"holder": holder, "period": period, "begins_at": begin}
    amount: int | None = session.execute_pinned(_SPENT_IN, values).scalar()
    return amount or 0


_USES = BudgetUse.__table__
_SPENT_IN = select(_USES.c.amount).where(
    *(_USES.c[name] == bindparam(name) for name in ("tenant_id", "holder", "period", "begins_at"))
)


def add_to_uses(session: TenantRows, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add amounts to what was spent, identified by holder, period and its begin."""
    session.execute_pinned(_add_to_uses(session.dialect), rows)


@cache
def _add_to_uses(dialect: str) -> Executable:
    statement = insert_into(BudgetUse, dialect)
    added = {"amount": _USES.c.amount + statement.excluded.amount}
    key = primary_key(BudgetUse)
    return cast(Executable, statement.on_conflict_do_update(index_elements=key, set_=added))


def add_alerts(session: TenantRows, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add alerts, all their columns but the tenant's; existing ones stay as they are."""
    session.execute_pinned(_add_alerts(session.dialect), rows)


@cache
def _add_alerts(dialect: str) -> Executable:
    statement = insert_into(BudgetAlert, dialect)
    key = primary_key(BudgetAlert)
    return cast(Executable, statement.on_conflict_do_nothing(index_elements=key))


def list_tenants_to_alert(session: PlatformSession) -> Sequence[str]:
    """The ids of the tenants that have alerts which are not announced."""
    query = select(BudgetAlert.tenant_id).where(BudgetAlert.announced_at.is_(None)).distinct()
    return session.scalars(query.order_by(BudgetAlert.tenant_id)).all()


def lock_next_alert(session: TenantSession) -> BudgetAlert | None:
    """The tenant's oldest alert that is not announced, locked until the unit of work ends."""
    query = select(BudgetAlert).where(BudgetAlert.announced_at.is_(None))
    query = query.order_by(BudgetAlert.created_at).limit(1).with_for_update(skip_locked=True)
    return session.scalars(query.execution_options(populate_existing=True)).one_or_none()


def sum_days(session: TenantSession, since: date, until: date) -> int:
    """What the tenant was charged for requests and training, from the day `since` to the day before
    `until`."""
    query = select(func.coalesce(func.sum(UsageDay.amount), 0)).where(
        UsageDay.day >= since, UsageDay.day < until
    )
    return int(session.scalar(query) or 0)


def sum_ledger(
    session: TenantSession,
    *,
    user_id: str | None,
    key_id: str | None,
    since: datetime,
    until: datetime,
) -> int:
    """The amounts in the tenant's ledger in `[since, until)`, of one user or key."""
    query = select(func.coalesce(func.sum(UsageRecord.amount), 0)).where(
        UsageRecord.created_at >= since, UsageRecord.created_at < until
    )
    if user_id is not None:
        query = query.where(UsageRecord.user_id == user_id)
    if key_id is not None:
        query = query.where(UsageRecord.key_id == key_id)
    return int(session.scalar(query) or 0)


def sum_training(
    session: TenantSession, *, user_id: str | None, key_id: str | None, since: date, until: date
) -> int:
    """What the jobs of one user or key were charged, from the day `since` to the day before
    `until`."""
    query = select(func.coalesce(func.sum(TrainingDay.amount), 0)).where(
        TrainingDay.day >= since, TrainingDay.day < until
    )
    if user_id is not None:
        query = query.where(TrainingDay.user_id == user_id)
    if key_id is not None:
        query = query.where(TrainingDay.key_id == key_id)
    return int(session.scalar(query) or 0)
