"""Budgets of money, changed by one unit of work that holds the tenant's limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from ..errors import BudgetExhausted, RateLimited
from ..prices.money import format_money
from ..quotas.holder import Holder, possessive
from ..quotas.models import Period
from ..quotas.period import begin_of
from ..quotas.standing import Standing
from ..sessions import TenantRows
from . import repository
from .repository import BudgetRow

EXHAUSTED = 100
"""Percent: also alerted when a request is refused because it may cost more than is left."""


class _Use(NamedTuple):
    """What is counted: the spending of a holder in one period."""

    holder: Holder
    period: Period
    begins_at: datetime


class HeldBudgets:
    """The budgets of the holders that the requests of a unit of work have."""

    def __init__(self, session: TenantRows) -> None:
        self._session = session
        self._budgets: dict[Holder, list[BudgetRow]] = {}
        self._before: dict[_Use, int] = {}
        self._spent: Counter[_Use] = Counter()
        self._alerts: dict[tuple[_Use, int], Mapping[str, Any]] = {}

    @property
    def has_alerts(self) -> bool:
        """Whether `write` adds alerts."""
        return bool(self._alerts)

    def load(self, holders: Iterable[Holder]) -> None:
        """Read the budgets of these holders, unless they were read before."""
        if unknown := set(holders) - self._budgets.keys():
            self._budgets.update((holder, []) for holder in unknown)
            for row in repository.rows_of(self._session, sorted(unknown)):
                self._budgets[row.holder].append(row)

    def check(
        self,
        holders: Iterable[Holder],
        cost: int,
        *,
        moment: datetime,
        reserved: Callable[[Holder], int],
        standing: Standing,
    ) -> None:
        """Check that a request of these holders which costs at most `cost` fits in every budget.

        `reserved`: the most that the running requests of a holder cost. Raises RateLimited if it
        would fit without them, otherwise BudgetExhausted.
        """
        for budget in self._of(holders):
            use = _Use(budget.holder, budget.period, begin_of(budget.period, moment))
            left = max(0, budget.amount - self._total(use))
            running = reserved(budget.holder)
            if cost <= left - running:
                continue
            says = (
                f"{possessive(budget.holder).capitalize()} budget is "
                f"{format_money(budget.amount)} a {budget.period}: {format_money(left)} is left"
            )
            if cost <= left:
                raise RateLimited(
                    f"{says}, of which running requests may cost {format_money(running)}, and this "
                    f"may cost {format_money(cost)}.",
                    standing=standing,
                )
            if EXHAUSTED in budget.alert_percents:
                self._alert(use, budget, EXHAUSTED)
            raise BudgetExhausted(
                f"{says}, and this may cost {format_money(cost)}; `max_tokens` limits the cost.",
                standing=standing,
            )

    def spend(self, holders: Iterable[Holder], amount: int, at: datetime) -> None:
        """Count what an ended request or training cost, in the periods of that time."""
        for budget in self._of(holders):
            use = _Use(budget.holder, budget.period, begin_of(budget.period, at))
            before = self._total(use)
            self._spent[use] += amount
            for percent in budget.alert_percents:
                if 100 * before < percent * budget.amount <= 100 * (before + amount):
                    self._alert(use, budget, percent)

    def write(self) -> None:
        """Write what was spent, and the alerts."""
        rows = [{**use._asdict(), "amount": amount} for use, amount in sorted(self._spent.items())]
        if rows:
            repository.add_to_uses(self._session, rows)
        if self._alerts:
            repository.add_alerts(self._session, list(self._alerts.values()))

    def _of(self, holders: Iterable[Holder]) -> list[BudgetRow]:
        holders = list(holders)
        self.load(holders)
        return [budget for holder in holders for budget in self._budgets[holder]]

    def _total(self, use: _Use) -> int:
        """What is spent, with this unit of work."""
        if use not in self._before:
            self._before[use] = repository.spent_in(self._session, *use)
        return self._before[use] + self._spent[use]

    def _alert(self, use: _Use, budget: BudgetRow, percent: int) -> None:
        alert = {
            **use._asdict(),
            "percent": percent,
            "budget": budget.amount,
            "spent": self._total(use),
        }
        self._alerts.setdefault((use, percent), alert)
