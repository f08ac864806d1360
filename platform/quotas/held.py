"""A tenant's limits and usage, locked by one unit of work.

They are read once, changed in memory for all requests of the unit of work, and written once, so the
requests share the database cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ..adapters.registry import AdapterRef
from ..base import utc_now
from ..budgets.held import HeldBudgets
from ..errors import InsufficientQuota, RateLimited, TooManyRequestsAtOnce
from ..lazy_property import lazy_property
from ..sessions import TenantRows
from . import repository
from .bucket import Reading
from .clock import Clock, moment_of, read_clock
from .held_callers import HeldCallers
from .holder import Holder, callers_of, payers_of
from .limits import NO_LIMITS, Limits
from .models import RateKind
from .period import begin_of
from .rates import Costs, Rates
from .repository import Reserved, Settled
from .running import CallerUse, Running
from .standing import Standing

LEASE_SECONDS = 60.0
"""A reservation counts against limits for this long after its server last reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request may use."""

    request_id: str
    key_id: str | None
    user_id: str | None = None
    """Who called, or owns the key."""
    adapter: AdapterRef | None
    """None is the base model."""
    input_tokens: int
    output_tokens: int
    """The most that it may generate, all its choices together."""
    admitted_at: datetime = field(default_factory=utc_now)
    """The prices of this time are charged."""
    is_batch: bool = False
    amount: int = 0
    """The most that it may cost, in 1e-9 of the currency's unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """What an ended request used; nothing if it never ran."""

    request_id: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    user_id: str | None = None
    key_id: str | None = None
    amount: int = 0
    """What it costs, in 1e-9 of the currency's unit."""
    at: datetime | None = None
    """The time of its ledger row, which selects the budgets' periods; None: no row, so no budget is
    charged."""


@contextmanager
def hold(session: TenantRows, *, clock: Clock = read_clock) -> Iterator[HeldLimits]:
    """The tenant's limits, from their first use to the end of the unit of work; writes at the end.

    Rows of the ledger are added before that, so that two servers never wait for each other.
    """
    held = HeldLimits(session, clock)
    yield held
    held.write()


class HeldLimits:
    """The remaining amounts of a tenant's limits, while requests reserve and settle."""

    def __init__(self, session: TenantRows, clock: Clock) -> None:
        self._session = session
        self._clock = clock
        self._reservations: list[Mapping[str, Any]] = []
        self._period_tokens: Counter[datetime] = Counter()
        """Usage in addition to that in the database, by the beginning of the period."""

    def settle(self, requests: Sequence[Used]) -> None:
        """Settle ended requests: their unused amounts are refunded. May be repeated for those
        without a row in the ledger; must be called before `reserve`."""
        if not requests or self._row is None:  # without limits nothing was reserved
            return
        ids = [used.request_id for used in requests]
        reservations = repository.remove_reservations(self._session, ids)
        if self._has_budgets:
            self._budgets.load({holder for used in requests for holder in _payers(used)})
        for used in requests:
            if reservation := reservations.get(used.request_id):
                self._refund(reservation, used)
            if used.at is not None:
                self._spend(used, used.at)

    def spend(self, holders: Sequence[Holder], amount: int, at: datetime) -> None:
        """Charge the budgets of money of these holders, in the periods of that time."""
        if amount and self._has_budgets:
            self._budgets.spend(holders, amount, at)

    def reserve(self, demand: Demand, server_id: str) -> Standing:
        """Admit the request and record its reservation; returns the tenant's remaining amounts.

        Nothing is recorded if the tenant has no request limits. Raises RateLimited,
        TooManyRequestsAtOnce, InsufficientQuota or BudgetExhausted, with the remaining amounts;
        then nothing is changed but an alert that a budget is exhausted.
        """
        if not (self._limits.restrict_requests or self._has_budgets or self._limits_callers):
            return {}
        self._check_budget(demand)
        self._check_money(demand)
        self._check_running()
        rates = self._rates
        costs = rates.costs(input_tokens=demand.input_tokens, output_tokens=demand.output_tokens)
        rates.check(costs)
        self._check_caller(demand)
        rates.pay(costs)
        self._note_running(demand)
        self._reservations.append(_reservation(demand, costs, server_id, self._now))
        return rates.standing

    def write(self) -> None:
        """Write the changes."""
        if self._period_tokens:
            period = self._limits.period
            repository.add_to_periods(self._session, period, sorted(self._period_tokens.items()))
        if "_rates" in self.__dict__ and (changes := self._rates.changes):
            repository.write_buckets(self._session, changes)
        if "_callers" in self.__dict__:
            self._callers.write()
        if "_budgets" in self.__dict__:
            self._budgets.write()
        if self._reservations:
            repository.add_reservations(self._session, self._reservations)

    @property
    def has_alerts(self) -> bool:
        """Whether alerts of budgets are written with this unit of work."""
        return "_budgets" in self.__dict__ and self._budgets.has_alerts

    @lazy_property
    def _row(self) -> Mapping[str, Any] | None:
        return repository.lock_limits(self._session)

    @lazy_property
    def _limits(self) -> Limits:
        if self._row is None:
            return NO_LIMITS
        return Limits(**{name: self._row[name] for name in Limits.__slots__})

    @property
    def _has_budgets(self) -> bool:
        return self._row is not None and self._row["has_budgets"]

    @property
    def _limits_callers(self) -> bool:
        return self._row is not None and self._row["has_caller_limits"]

    @lazy_property
    def _budgets(self) -> HeldBudgets:
        return HeldBudgets(self._session)

    @lazy_property
    def _callers(self) -> HeldCallers:
        return HeldCallers(self._session, self._now)

    @lazy_property
    def _running_of_holders(self) -> Running:
        """The unsettled reservations by user and key, with those of this unit of work."""
        return Running(repository.list_running(self._session, self._now))

    @lazy_property
    def _now(self) -> Reading:
        # After locking, so that waiting is not counted twice.
        return self._clock(self._session)

    @lazy_property
    def _rates(self) -> Rates:
        now = self._now
        return Rates(self._limits, repository.list_buckets(self._session), now)

    @lazy_property
    def _running(self) -> Reserved:
        """The unsettled reservations of other requests."""
        return repository.sum_reservations(self._session, self._now)

    @lazy_property
    def _period_begin(self) -> datetime:
        return begin_of(self._limits.period, moment_of(self._now))

    @lazy_property
    def _period_tokens_before(self) -> int:
        use = repository.sum_period(self._session, self._limits.period, self._period_begin)
        return use or 0

    def _check_running(self) -> None:
        """Check that one more request may run. Raises TooManyRequestsAtOnce."""
        most = self._limits.concurrent_requests
        if most is None:
            return
        num_running = self._running.num_requests + len(self._reservations)
        if num_running >= most:
            raise TooManyRequestsAtOnce(
                f"The limit is {most} requests at once, and {num_running} run.",
                standing=self._rates.standing,
            )

    def _check_budget(self, demand: Demand) -> None:
        """The period's budget has room for the most that the request may use. Raises a
        LimitReached."""
        budget, period = self._limits.tokens_per_period, self._limits.period
        if budget is None:
            return
        left = budget - self._period_tokens_before - self._period_tokens[self._period_begin]
        num_reserved = self._running.tokens + sum(
            row["input_tokens"] + row["output_tokens"] for row in self._reservations
        )
        cost = demand.input_tokens + demand.output_tokens
        needed = min(cost, budget)
        if left - num_reserved >= needed:
            return
        says = f"The limit is {budget} tokens a {period}: {left} are left"
        if left >= needed:
            raise RateLimited(
                f"{says}, of which running requests may use {num_reserved}, and this may use "
                f"{cost}.",
                standing=self._rates.standing,
            )
        raise InsufficientQuota(
            f"{says}, and this may use {cost}; `max_tokens` says how many at most.",
            standing=self._rates.standing,
        )

    def _check_money(self, demand: Demand) -> None:
        """Every budget of money has room for the most that the request costs. Raises a
        LimitReached."""
        if self._has_budgets:
            self._budgets.check(
                _payers(demand),
                demand.amount,
                moment=moment_of(self._now),
                reserved=self._running_of_holders.amount,
                standing=self._rates.standing,
            )

    def _check_caller(self, demand: Demand) -> None:
        """The limits of the user and the key let the request pass; then they are paid. Raises a
        LimitReached."""
        if self._limits_callers:
            callers = callers_of(demand.user_id, demand.key_id)
            tokens = {"input_tokens": demand.input_tokens, "output_tokens": demand.output_tokens}
            num_running = self._running_of_holders.num_requests
            self._callers.check(callers, **tokens, num_running=num_running)
            self._callers.pay(callers, **tokens)

    def _note_running(self, demand: Demand) -> None:
        if self._has_budgets or self._limits_callers:
            use = CallerUse(demand.user_id, demand.key_id, 1, demand.amount)
            self._running_of_holders.add(use)

    def _refund(self, reservation: Settled, used: Used) -> None:
        """Return what was reserved and not used."""
        self._rates.pay(
            {
                RateKind.INPUT_TOKENS: used.prompt_tokens - reservation.paid_input_tokens,
                RateKind.OUTPUT_TOKENS: used.completion_tokens - reservation.paid_output_tokens,
            }
        )
        if self._limits_callers:
            self._callers.refund(
                callers_of(reservation.user_id, reservation.key_id),
                reserved=(reservation.input_tokens, reservation.output_tokens),
                used=(used.prompt_tokens, used.completion_tokens),
            )

    def _spend(self, used: Used, at: datetime) -> None:
        """Charge the budgets of tokens and of money."""
        if self._limits.tokens_per_period is not None:
            begin = begin_of(self._limits.period, at)
            self._period_tokens[begin] += used.prompt_tokens + used.completion_tokens
        self.spend(_payers(used), used.amount, at)


def _payers(request: Demand | Used) -> tuple[Holder, ...]:
    return payers_of(request.user_id, request.key_id)


def _reservation(demand: Demand, costs: Costs, server_id: str, now: Reading) -> Mapping[str, Any]:
    adapter = demand.adapter
    return {
        "request_id": demand.request_id,
        "server_id": server_id,
        "key_id": demand.key_id,
        "user_id": demand.user_id,
        "adapter_name": adapter and adapter.name,
        "adapter_version": adapter and adapter.version,
        "adapter_digest": adapter and adapter.key.digest,
        "input_tokens": demand.input_tokens,
        "output_tokens": demand.output_tokens,
        "amount": demand.amount,
        "paid_input_tokens": costs.get(RateKind.INPUT_TOKENS, 0),
        "paid_output_tokens": costs.get(RateKind.OUTPUT_TOKENS, 0),
        "clock": now.clock,
        "expires_at": now.seconds + LEASE_SECONDS,
    }
