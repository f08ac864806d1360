"""Sets, removes and lists budgets of money."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from ..errors import BudgetNotFound, InvalidValue
from ..prices.money import MAX_AMOUNT, format_money
from ..quotas.clock import Clock, moment_of, read_clock
from ..quotas.holder import TENANT, Holder, id_of
from ..quotas.limits import lock_or_add_quota
from ..quotas.models import Period
from ..quotas.period import begin_of, end_of
from ..quotas.repository import list_running
from ..quotas.running import Running
from ..sessions import TenantSession
from . import repository
from .models import Budget, BudgetUse

DEFAULT_ALERTS = (50, 80, 100)
"""Percent."""
MAX_ALERTS = 10


@dataclass(frozen=True, slots=True)
class Spending:
    """A budget and its use in the present period; amounts in 1e-9 of the currency's unit."""

    budget: Budget
    spent: int
    reserved: int
    """The most that running requests cost; not part of `spent`."""
    begins_at: datetime
    ends_at: datetime
    name: str | None
    """The user's email address, or the key's name; None: the budget is the tenant's."""

    @property
    def remaining(self) -> int:
        return max(0, self.budget.amount - self.spent - self.reserved)


def set_budget(
    session: TenantSession,
    holder: Holder,
    period: Period,
    amount: int,
    alert_percents: Iterable[int] = DEFAULT_ALERTS,
    *,
    clock: Clock = read_clock,
) -> Budget:
    """Set what the holder may spend in each period; what was spent in the present period counts.

    Percentages that are spent already are alerted at once. Raises InvalidValue. The caller has
    checked that the tenant has the user or key.
    """
    percents = _check(amount, alert_percents)
    quota = lock_or_add_quota(session)
    quota.has_budgets = True
    budget, moment = repository.find_budget(session, holder, period), moment_of(clock(session))
    if budget is None:
        _count_period(session, holder, period, moment)
        budget = Budget(holder=holder, period=period, amount=amount, alert_percents=percents)
        session.add(budget)
    budget.amount, budget.alert_percents = amount, percents
    session.flush()
    _alert_spent(session, budget, begin_of(period, moment))
    return budget


def _alert_spent(session: TenantSession, budget: Budget, begin: datetime) -> None:
    use = {"holder": budget.holder, "period": budget.period, "begins_at": begin}
    spent = repository.spent_in(session, budget.holder, budget.period, begin)
    alerts = [
        {**use, "percent": percent, "budget": budget.amount, "spent": spent}
        for percent in budget.alert_percents
        if 100 * spent >= percent * budget.amount
    ]
    if alerts:
        repository.add_alerts(session, alerts)


def remove_budget(session: TenantSession, holder: Holder, period: Period) -> None:
    """The holder has no budget of this period any more. Raises BudgetNotFound."""
    quota = lock_or_add_quota(session)
    budget = repository.find_budget(session, holder, period)
    if budget is None:
        raise BudgetNotFound
    session.delete(budget)
    session.flush()
    quota.has_budgets = repository.has_budget(session)
    session.flush()


def copy_budgets(
    session: TenantSession, source: Holder, target: Holder, *, clock: Clock = read_clock
) -> None:
    """Give the target the budgets of the source, and what was spent of them in this period."""
    budgets = repository.list_budgets(session, source)
    if not budgets:
        return
    lock_or_add_quota(session)
    moment = moment_of(clock(session))
    for budget in budgets:
        begin = begin_of(budget.period, moment)
        spent = repository.spent_in(session, source, budget.period, begin)
        session.add(
            Budget(
                holder=target,
                period=budget.period,
                amount=budget.amount,
                alert_percents=budget.alert_percents,
            )
        )
        session.add(BudgetUse(holder=target, period=budget.period, begins_at=begin, amount=spent))
    session.flush()


def list_spendings(
    session: TenantSession, holder: Holder | None = None, *, clock: Clock = read_clock
) -> Sequence[Spending]:
    """The tenant's budgets with their present use; those of all holders if none is named."""
    budgets = repository.list_budgets(session, holder)
    if not budgets:
        return []
    now = clock(session)
    running = Running(list_running(session, now))
    names = repository.names_of(session, {budget.holder for budget in budgets})
    return [_spending(session, budget, running, moment_of(now), names) for budget in budgets]


def _spending(
    session: TenantSession,
    budget: Budget,
    running: Running,
    moment: datetime,
    names: Mapping[Holder, str],
) -> Spending:
    begin = begin_of(budget.period, moment)
    return Spending(
        budget,
        repository.spent_in(session, budget.holder, budget.period, begin),
        running.amount(budget.holder),
        begin,
        end_of(budget.period, begin),
        names.get(budget.holder),
    )


def _count_period(session: TenantSession, holder: Holder, period: Period, moment: datetime) -> None:
    """Set what was spent in the period of this time from the usage."""
    begin = begin_of(period, moment)
    spent = _sum_usage(session, holder, begin, end_of(period, begin))
    use = repository.find_use(session, holder, period, begin)
    if use is None:
        session.add(BudgetUse(holder=holder, period=period, begins_at=begin, amount=spent))
    else:
        use.amount = spent


def _sum_usage(session: TenantSession, holder: Holder, since: datetime, until: datetime) -> int:
    """What the holder spent for requests and training in `[since, until)`, both at midnight UTC."""
    first, end = since.date(), until.date()
    if holder == TENANT:
        return repository.sum_days(session, first, end)
    user_id, key_id = id_of(holder)
    caller = {"user_id": user_id, "key_id": key_id}
    requests = repository.sum_ledger(session, **caller, since=since, until=until)
    return requests + repository.sum_training(session, **caller, since=first, until=end)


def _check(amount: int, alert_percents: Iterable[int]) -> list[int]:
    """The percents in order. Raises InvalidValue."""
    if not 0 <= amount <= MAX_AMOUNT:
        raise InvalidValue(
            f"A budget must be from 0 to {format_money(MAX_AMOUNT)}.", param="amount"
        )
    percents = sorted(set(alert_percents))
    if len(percents) > MAX_ALERTS or any(not 1 <= percent <= 100 for percent in percents):
        raise InvalidValue(
            f"Alerts are at most {MAX_ALERTS} percentages from 1 to 100.", param="alert_percents"
        )
    return percents
