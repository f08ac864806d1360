"""What fine-tuning jobs cost counts in the budgets of their tenant, and of the user and key that
created them.

Nothing is reserved: a job is charged for the steps that it has done.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from ..base import utc_now
from ..errors import BudgetExhausted
from ..prices.money import format_money
from ..quotas.held import hold
from ..quotas.holder import Holder, possessive
from ..quotas.period import begin_of
from ..quotas.repository import share_tenant
from ..sessions import TenantSession
from . import repository
from .repository import BudgetRow


def spend(session: TenantSession, holders: Sequence[Holder], amount: int, at: datetime) -> None:
    """Count what steps cost these holders, in the periods of that time, with the alerts that this
    makes.

    Call it in the unit of work that adds the amount to the usage, and before that: like a request,
    it locks the tenant's limits first and the day last.
    """
    share_tenant(session)
    with hold(session) as held:
        held.spend(holders, amount, at)


def find_exhausted(session: TenantSession, holders: Sequence[Holder]) -> BudgetRow | None:
    """A budget of these holders of which nothing is left in the present period."""
    moment = utc_now()
    for budget in repository.rows_of(session, holders):
        begin = begin_of(budget.period, moment)
        if repository.spent_in(session, budget.holder, budget.period, begin) >= budget.amount:
            return budget
    return None


def check_left(session: TenantSession, holders: Sequence[Holder]) -> None:
    """Raises BudgetExhausted if nothing is left of a budget of these holders."""
    budget = find_exhausted(session, holders)
    if budget is not None:
        raise BudgetExhausted(
            f"{possessive(budget.holder).capitalize()} budget is {format_money(budget.amount)} a "
            f"{budget.period}, and nothing is left to train with.",
            standing={},
        )
