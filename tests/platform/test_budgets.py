"""Budgets of money: reserving and settling on both databases."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Barrier

import pytest
from sqlalchemy import select

from loraplex.platform.base import utc_now
from loraplex.platform.budgets import service as budgets
from loraplex.platform.budgets.alerts import announce_next
from loraplex.platform.budgets.models import BudgetAlert
from loraplex.platform.budgets.service import Spending
from loraplex.platform.database import Database
from loraplex.platform.errors import BudgetExhausted, BudgetNotFound, InvalidValue, RateLimited
from loraplex.platform.quotas import service as quotas
from loraplex.platform.quotas.bucket import Reading
from loraplex.platform.quotas.clock import DATABASE_CLOCK
from loraplex.platform.quotas.holder import TENANT, Holder, key_holder, user_holder
from loraplex.platform.quotas.limits import restrict_requests
from loraplex.platform.quotas.models import Period, Reservation
from loraplex.platform.quotas.service import LEASE_SECONDS, Demand
from loraplex.platform.sessions import Transaction
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.usage import service as ledger
from loraplex.platform.usage.service import Usage
from loraplex.platform.webhooks.models import WebhookDelivery
from loraplex.platform.webhooks.service import WebhookService
from loraplex.platform.webhooks.signing import SigningSecrets
from support.limits import SERVER_ID
from support.money import set_budget

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)


class MovedClock:
    """The database's clock, at a moment that the test sets."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self, session: Transaction) -> Reading:
        return Reading(DATABASE_CLOCK, self.now.timestamp())


class Purse:
    """One tenant's requests, which cost what the test says."""

    def __init__(self, database: Database, tenant: Tenant) -> None:
        self.database = database
        self.tenant_id = tenant.id
        self.clock = MovedClock()

    def reserve(
        self, request_id: str, amount: int, *, user: str | None = None, key: str | None = None
    ) -> None:
        demand = Demand(
            request_id=request_id,
            key_id=key,
            user_id=user,
            adapter=None,
            input_tokens=1,
            output_tokens=1,
            amount=amount,
        )
        with self.database.statements(self.tenant_id) as session:
            quotas.reserve(session, demand, server_id=SERVER_ID, clock=self.clock)

    def settle(
        self,
        request_id: str,
        amount: int,
        *,
        user: str | None = None,
        key: str | None = None,
        at: datetime | None = None,
    ) -> None:
        usage = Usage(
            request_id=request_id,
            prompt_tokens=1,
            cached_tokens=0,
            completion_tokens=1,
            finish_reason="stop",
            key_id=key,
            user_id=user,
            price_id=1,
            amount=amount,
            ended_at=at or self.clock.now,
        )
        with (
            self.database.statements(self.tenant_id) as session,
            quotas.hold(session, clock=self.clock) as held,
        ):
            ledger.record_all(session, [usage], held)

    def set(
        self,
        amount: int,
        holder: Holder = TENANT,
        period: Period = Period.MONTH,
        alerts: tuple[int, ...] = (),
    ) -> None:
        with self.database.transaction(self.tenant_id) as session:
            budgets.set_budget(session, holder, period, amount, alerts, clock=self.clock)

    def spendings(self) -> dict[tuple[str, str], Spending]:
        with self.database.transaction(self.tenant_id, read_only=True) as session:
            found = budgets.list_spendings(session, clock=self.clock)
        return {(each.budget.holder, str(each.budget.period)): each for each in found}

    def spent(self, holder: Holder = TENANT, period: str = "month") -> int:
        return self.spendings()[holder, period].spent

    def alerts(self) -> list[tuple[str, int, int]]:
        with self.database.transaction(self.tenant_id, read_only=True) as session:
            rows = session.scalars(
                select(BudgetAlert).order_by(BudgetAlert.holder, BudgetAlert.percent)
            ).all()
        return [(row.holder, row.percent, row.spent) for row in rows]

    def is_limited(self) -> bool:
        with self.database.platform_transaction(read_only=True) as session:
            return restrict_requests(session, self.tenant_id)


@pytest.fixture
def purse(database: Database, acme: Tenant) -> Purse:
    return Purse(database, acme)


def test_the_most_that_a_request_costs_is_reserved_and_the_rest_is_returned(purse: Purse) -> None:
    purse.set(100)
    purse.reserve("a", 60)
    with pytest.raises(RateLimited, match=r"of which running requests may cost 0.00000006"):
        purse.reserve("b", 41)
    purse.reserve("b", 40)
    purse.settle("a", 10)
    assert purse.spent() == 10
    with pytest.raises(BudgetExhausted, match=r"0.00000009 is left, and this may cost 0.0000001;"):
        purse.reserve("c", 100)
    purse.reserve("c", 50)
    spending = purse.spendings()[TENANT, "month"]
    assert (spending.spent, spending.reserved, spending.remaining) == (10, 90, 0)


def test_a_request_that_costs_nothing_passes_an_exhausted_budget(purse: Purse) -> None:
    purse.set(0)
    purse.reserve("free", 0)
    with pytest.raises(BudgetExhausted):
        purse.reserve("a", 1)


@pytest.mark.parametrize("tight", [TENANT, user_holder("u"), key_holder("k")])
def test_the_budgets_of_the_tenant_the_user_and_the_key_all_hold(
    purse: Purse, tight: Holder
) -> None:
    holders = [TENANT, user_holder("u"), key_holder("k")]
    for holder in holders:
        purse.set(20 if holder == tight else 1000, holder)
    purse.reserve("a", 20, user="u", key="k")
    purse.settle("a", 15, user="u", key="k")
    assert [purse.spent(holder) for holder in holders] == [15, 15, 15]
    with pytest.raises(BudgetExhausted):
        purse.reserve("b", 6, user="u", key="k")
    purse.reserve("c", 5, user="u", key="k")


def test_another_users_requests_do_not_count(purse: Purse) -> None:
    purse.set(10, user_holder("u"))
    purse.reserve("a", 1000, user="v", key="k")
    purse.settle("a", 1000, user="v", key="k")
    purse.reserve("b", 10, user="u", key="k")
    assert purse.spent(user_holder("u")) == 0


def test_a_day_and_a_month_are_counted_apart_and_begin_at_midnight(purse: Purse) -> None:
    purse.set(30, period=Period.DAY)
    purse.set(50)
    purse.reserve("a", 30)
    purse.settle("a", 30)
    with pytest.raises(BudgetExhausted, match="a day"):
        purse.reserve("b", 1)
    purse.clock.now += timedelta(days=1)
    with pytest.raises(BudgetExhausted, match="a month"):
        purse.reserve("c", 21)
    purse.reserve("d", 20)
    purse.settle("d", 20)
    assert (purse.spent(period="day"), purse.spent()) == (20, 50)
    purse.clock.now += timedelta(days=31)
    purse.reserve("e", 30)


def test_what_was_spent_before_a_budget_was_set_counts(purse: Purse) -> None:
    purse.settle("old", 500, at=NOON - timedelta(days=31))
    purse.settle("a", 7, user="u", key="k")
    purse.settle("b", 8, key="k")
    purse.settle("c", 9, user="u")
    for holder in (TENANT, user_holder("u"), key_holder("k")):
        purse.set(100, holder)
    assert purse.spent() == 24
    assert purse.spent(user_holder("u")) == 16
    assert purse.spent(key_holder("k")) == 15


def test_a_raised_budget_lets_requests_pass_and_a_removed_one_too(purse: Purse) -> None:
    purse.set(10)
    purse.settle("a", 10)
    with pytest.raises(BudgetExhausted):
        purse.reserve("b", 5)
    purse.set(15)
    purse.reserve("b", 5)
    assert purse.is_limited()
    with purse.database.transaction(purse.tenant_id) as session:
        budgets.remove_budget(session, TENANT, Period.MONTH)
    assert not purse.is_limited()
    purse.reserve("c", 10**6)
    with (
        pytest.raises(BudgetNotFound),
        purse.database.transaction(purse.tenant_id) as session,
    ):
        budgets.remove_budget(session, TENANT, Period.MONTH)


def test_a_set_again_budget_counts_what_was_spent_without_it(purse: Purse) -> None:
    purse.set(100)
    purse.settle("a", 10)
    with purse.database.transaction(purse.tenant_id) as session:
        budgets.remove_budget(session, TENANT, Period.MONTH)
    purse.settle("b", 20)
    purse.set(100)
    assert purse.spent() == 30


def test_a_reservation_of_a_server_that_died_expires(purse: Purse) -> None:
    purse.set(10)
    purse.reserve("a", 10)
    purse.clock.now += timedelta(seconds=LEASE_SECONDS - 1)
    with pytest.raises(RateLimited):
        purse.reserve("b", 1)
    purse.clock.now += timedelta(seconds=2)
    purse.reserve("b", 10)


def test_an_alert_is_made_once_for_each_percentage_and_anew_for_a_raised_budget(
    purse: Purse,
) -> None:
    purse.set(100, alerts=(50, 80, 100))
    purse.settle("a", 49)
    assert purse.alerts() == []
    purse.settle("b", 36)
    purse.settle("c", 1)
    assert purse.alerts() == [(TENANT, 50, 85), (TENANT, 80, 85)]
    purse.set(150, alerts=(80,))
    purse.settle("d", 40)
    assert purse.alerts() == [(TENANT, 50, 85), (TENANT, 80, 85), (TENANT, 80, 126)]


def test_what_is_spent_already_is_alerted_when_the_budget_is_set(purse: Purse) -> None:
    purse.set(1000, alerts=(100,))
    purse.settle("a", 60)
    purse.set(100, alerts=(50, 80))
    assert purse.alerts() == [(TENANT, 50, 60)]
    purse.set(100, alerts=(50, 80))
    purse.settle("b", 30)
    assert purse.alerts() == [(TENANT, 50, 60), (TENANT, 80, 90)]


def test_a_refusal_by_an_exhausted_budget_alerts_in_a_batch_that_is_committed(
    purse: Purse,
) -> None:
    purse.set(100, alerts=(100,))
    purse.settle("a", 95)
    demand = Demand(
        request_id="b", key_id=None, adapter=None, input_tokens=1, output_tokens=1, amount=6
    )
    for _ in range(2):
        with (
            purse.database.statements(purse.tenant_id) as session,
            quotas.hold(session, clock=purse.clock) as held,
        ):
            with pytest.raises(BudgetExhausted):
                held.reserve(demand, SERVER_ID)
            assert held.has_alerts
    assert purse.alerts() == [(TENANT, 100, 95)]


def test_an_alert_is_announced_once(purse: Purse) -> None:
    purse.set(10, key_holder("k"), alerts=(50,))
    purse.settle("a", 6, key="k")
    with purse.database.transaction(purse.tenant_id) as session:
        webhooks = WebhookService(SigningSecrets([b"a" * 32]))
        url = "https://hooks.example.com/"
        webhooks.create(session, url=url, events=None, description=None, created_by="key:k")
        event = announce_next(session)
        (delivery,) = session.scalars(select(WebhookDelivery))
    assert event
    assert json.loads(delivery.body)["data"] == {"holder": "key:k", **event.details}
    assert (event.action, event.resource) == ("budget.alert", "key:k")
    assert event.details == {
        "percent": 50,
        "period": "month",
        "period_begins_at": "2026-05-01T00:00:00+00:00",
        "budget": "0.00000001",
        "spent": "0.000000006",
    }
    with purse.database.transaction(purse.tenant_id) as session:
        assert announce_next(session) is None


def test_a_copied_budget_has_what_was_spent_of_it(purse: Purse) -> None:
    purse.set(10, key_holder("old"), alerts=(50,))
    purse.settle("a", 6, key="old")
    with purse.database.transaction(purse.tenant_id) as session:
        budgets.copy_budgets(session, key_holder("old"), key_holder("new"), clock=purse.clock)
    with pytest.raises(BudgetExhausted):
        purse.reserve("b", 5, key="new")
    purse.reserve("b", 4, key="new")


@pytest.mark.parametrize(
    ("amount", "alerts", "param"),
    [
        (-1, (), "amount"),
        (10**19, (), "amount"),
        (1, (0,), "alert_percents"),
        (1, (101,), "alert_percents"),
        (1, tuple(range(1, 12)), "alert_percents"),
    ],
)
def test_refuses_what_is_no_budget(
    purse: Purse, amount: int, alerts: tuple[int, ...], param: str
) -> None:
    with pytest.raises(InvalidValue) as refused:
        purse.set(amount, alerts=alerts)
    assert refused.value.param == param


def test_nothing_is_read_or_reserved_for_a_tenant_without_budgets(
    purse: Purse, bolt: Tenant
) -> None:
    set_budget(purse.database, bolt.id, 1)
    assert not purse.is_limited()
    purse.reserve("a", 10**9)
    with purse.database.transaction(purse.tenant_id, read_only=True) as session:
        assert session.scalars(select(Reservation)).all() == []


def test_threads_together_spend_no_more_than_the_budget(purse: Purse) -> None:
    purse.set(100, alerts=(100,))
    barrier = Barrier(6)

    def spend(number: int) -> int:
        spent = 0
        barrier.wait()
        for turn in range(8):
            request_id = f"{number}-{turn}"
            try:
                purse.reserve(request_id, 10)
            except (BudgetExhausted, RateLimited):
                continue
            purse.settle(request_id, 7)
            spent += 7
        return spent

    with ThreadPoolExecutor(6) as threads:
        total = sum(threads.map(spend, range(6)))
    assert total == purse.spent() <= 100
    assert total > 100 - 10, "it is used up to the last request that fits"


def test_a_budget_set_while_requests_settle_counts_each_once(purse: Purse) -> None:
    barrier = Barrier(4)

    def settle(number: int) -> None:
        barrier.wait()
        for turn in range(10):
            purse.settle(f"{number}-{turn}", 3, at=utc_now())

    def set_it() -> None:
        purse.clock.now = utc_now()
        barrier.wait()
        purse.set(10**6)

    with ThreadPoolExecutor(4) as threads:
        settling = [threads.submit(settle, number) for number in range(3)]
        threads.submit(set_it).result()
        for each in settling:
            each.result()
    assert purse.spent() == 3 * 10 * 3
