"""Reserving and settling with limits, on both databases."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm.attributes import set_committed_value

from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import (
    InsufficientQuota,
    InvalidValue,
    LimitReached,
    RateLimited,
    TooManyRequestsAtOnce,
)
from loraplex.platform.quotas import repository
from loraplex.platform.quotas import service as quotas
from loraplex.platform.quotas.clock import read_clock
from loraplex.platform.quotas.models import Period, PeriodUse, Quota, RateKind, Reservation
from loraplex.platform.quotas.period import begin_of, end_of
from loraplex.platform.quotas.service import LEASE_SECONDS, Demand, Limits, Standing, Used
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.usage import service as ledger
from loraplex.platform.usage.models import UsageRecord
from loraplex.platform.usage.service import Usage
from support.limits import SERVER_ID, SetClock, limit, make_demand

NUM_THREADS = 6
OTHER_SERVER = "22222222-2222-4222-8222-222222222222"


class Tills:
    """One tenant's requests, by a clock that the test sets."""

    def __init__(self, database: Database, tenant: Tenant) -> None:
        self.database = database
        self.tenant = tenant
        self.clock = SetClock()

    def reserve(self, demand: Demand, server_id: str = SERVER_ID) -> Standing:
        with self.database.transaction(self.tenant.id) as session:
            return quotas.reserve(session, demand, server_id=server_id, clock=self.clock)

    def settle(
        self, request_id: str, prompt: int, completion: int, at: datetime | None = None
    ) -> None:
        with self.database.transaction(self.tenant.id) as session:
            quotas.settle(
                session,
                request_id,
                prompt_tokens=prompt,
                completion_tokens=completion,
                at=at or utc_now(),
                clock=self.clock,
            )

    def release(self, request_id: str) -> None:
        with self.database.transaction(self.tenant.id) as session:
            quotas.release(session, request_id, clock=self.clock)

    def renew(self, server_id: str = SERVER_ID) -> int:
        with self.database.platform_transaction() as session:
            return quotas.renew(session, server_id, clock=self.clock)

    def purge(self) -> int:
        with self.database.platform_transaction() as session:
            return quotas.purge(session, clock=self.clock)

    def num_counted(self) -> int:
        """Reservations that count against limits."""
        with self.database.transaction(self.tenant.id, read_only=True) as session:
            return repository.sum_reservations(session, self.clock(session)).num_requests

    def level(self, kind: RateKind) -> float:
        """What the bucket holds now, as the next request would meet it."""
        with self.database.transaction(self.tenant.id, read_only=True) as session:
            use = quotas.current_use(session, clock=self.clock)
            row = repository.list_buckets(session)[kind]
        assert use.uses[f"{kind}_per_minute"].remaining == max(0, int(row.level))
        return row.level

    def reservation(self, request_id: str) -> Reservation | None:
        with self.database.transaction(self.tenant.id, read_only=True) as session:
            query = select(Reservation).where(Reservation.request_id == request_id)
            return session.scalars(query).one_or_none()

    def period_tokens(self, period: Period = Period.MONTH, at: datetime | None = None) -> int:
        with self.database.transaction(self.tenant.id, read_only=True) as session:
            use = repository.find_period_use(session, period, begin_of(period, at or utc_now()))
        return 0 if use is None else use.tokens


@pytest.fixture
def tills(database: Database, acme: Tenant) -> Tills:
    return Tills(database, acme)


def names(standing: Standing) -> dict[str, int]:
    return {str(kind): rate.remaining for kind, rate in standing.items()}


# --- rates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [None, {}, {"keys": 3}])
def test_without_limits_on_requests_every_one_passes_and_reserves_nothing(
    tills: Tills, limits: dict[str, int] | None
) -> None:
    if limits is not None:
        limit(tills.database, tills.tenant.id, **limits)
    assert tills.reserve(make_demand(input_tokens=7, output_tokens=9)) == {}
    assert tills.reservation("req-1") is None
    tills.settle("req-1", 7, 3)


def test_what_is_reserved_goes_with_its_request_though_nothing_limits_it_any_more(
    tills: Tills,
) -> None:
    limit(tills.database, tills.tenant.id, concurrent_requests=1)
    tills.reserve(make_demand(input_tokens=7, output_tokens=9))
    reservation = tills.reservation("req-1")
    assert reservation is not None
    assert (reservation.input_tokens, reservation.output_tokens) == (7, 9)
    limit(tills.database, tills.tenant.id)
    tills.settle("req-1", 7, 3)
    assert tills.reservation("req-1") is None


def test_requests_that_share_a_unit_of_work_count_against_each_other(tills: Tills) -> None:
    limit(
        tills.database,
        tills.tenant.id,
        requests_per_minute=10,
        concurrent_requests=2,
        tokens_per_period=100,
    )
    tills.reserve(make_demand("a", input_tokens=30, output_tokens=30))
    tills.reserve(make_demand("b", input_tokens=5, output_tokens=5))
    with (
        tills.database.transaction(tills.tenant.id) as session,
        quotas.hold(session, clock=tills.clock) as held,
    ):
        ended = Used(request_id="a", prompt_tokens=30, completion_tokens=10, at=utc_now())
        held.settle([ended, Used(request_id="never ran")])
        with pytest.raises(RateLimited, match="60 are left, of which running requests may use 10"):
            held.reserve(make_demand("c", input_tokens=1, output_tokens=50), SERVER_ID)
        standing = held.reserve(make_demand("d", input_tokens=1, output_tokens=49), SERVER_ID)
        assert standing[RateKind.REQUESTS].remaining == 7
        with pytest.raises(InsufficientQuota, match="60 are left, and this may use 61"):
            held.reserve(make_demand("e", input_tokens=1, output_tokens=60), SERVER_ID)
        with pytest.raises(RateLimited, match="of which running requests may use 60"):
            held.reserve(make_demand("e", input_tokens=1, output_tokens=0), SERVER_ID)
    assert tills.period_tokens() == 40
    assert tills.level(RateKind.REQUESTS) == 7
    ids = ("a", "b", "c", "d", "e")
    reserved = [request_id for request_id in ids if tills.reservation(request_id)]
    assert reserved == ["b", "d"]
    limit(tills.database, tills.tenant.id, concurrent_requests=2)
    with pytest.raises(TooManyRequestsAtOnce, match="2 requests at once, and 2 run"):
        tills.reserve(make_demand("f"))


def test_requests_that_are_reserved_or_settled_together_all_count(tills: Tills) -> None:
    limit(tills.database, tills.tenant.id, concurrent_requests=2, tokens_per_period=1000)
    with (
        tills.database.transaction(tills.tenant.id) as session,
        quotas.hold(session, clock=tills.clock) as held,
    ):
        for request_id in ("a", "b"):
            held.reserve(make_demand(request_id), SERVER_ID)
        with pytest.raises(TooManyRequestsAtOnce, match="2 requests at once, and 2 run"):
            held.reserve(make_demand("c"), SERVER_ID)
    with (
        tills.database.transaction(tills.tenant.id) as session,
        quotas.hold(session, clock=tills.clock) as held,
    ):
        held.settle(
            [
                Used(request_id=request_id, prompt_tokens=10, completion_tokens=used, at=utc_now())
                for request_id, used in (("a", 1), ("b", 20))
            ]
        )
    assert tills.period_tokens() == 41


def test_each_request_pays_and_says_what_is_left(tills: Tills) -> None:
    limit(
        tills.database,
        tills.tenant.id,
        requests_per_minute=3,
        input_tokens_per_minute=100,
        output_tokens_per_minute=50,
    )
    standing = tills.reserve(make_demand(input_tokens=30, output_tokens=20))
    assert names(standing) == {"requests": 2, "input_tokens": 70, "output_tokens": 30}
    assert standing[RateKind.REQUESTS].reset_seconds == pytest.approx(20.0)
    assert quotas.tightest_token_rate(standing) == standing[RateKind.OUTPUT_TOKENS]


@pytest.mark.parametrize(
    ("limits", "demand", "seconds"),
    [
        ({"requests_per_minute": 2}, make_demand("c"), 30.0),
        ({"input_tokens_per_minute": 100}, make_demand("c", input_tokens=85), 3.0),
        ({"output_tokens_per_minute": 60}, make_demand("c", output_tokens=40), 20.0),
        (
            {"requests_per_minute": 2, "input_tokens_per_minute": 100},
            make_demand("c", input_tokens=85),
            30.0,
        ),
        (
            {"requests_per_minute": 2, "output_tokens_per_minute": 60},
            make_demand("c", output_tokens=60),
            40.0,
        ),
    ],
)
def test_refuses_what_the_bucket_does_not_hold_until_exactly_when_it_does(
    tills: Tills, limits: dict[str, int], demand: Demand, seconds: float
) -> None:
    limit(tills.database, tills.tenant.id, **limits)
    for request_id in ("a", "b"):
        tills.reserve(make_demand(request_id))
    with pytest.raises(RateLimited) as refused:
        tills.reserve(demand)
    assert refused.value.retry_after_seconds == pytest.approx(seconds)
    assert refused.value.standing
    tills.clock.seconds += seconds * 0.99
    with pytest.raises(RateLimited):
        tills.reserve(demand)
    tills.clock.seconds += seconds * 0.01
    tills.reserve(demand)


def test_a_refused_request_costs_nothing_of_any_rate(tills: Tills) -> None:
    limit(tills.database, tills.tenant.id, requests_per_minute=60, output_tokens_per_minute=30)
    tills.reserve(make_demand("a", output_tokens=20))
    for _ in range(5):
        with pytest.raises(RateLimited) as refused:
            tills.reserve(make_demand("b", output_tokens=20))
        assert names(refused.value.standing) == {"requests": 59, "output_tokens": 10}
    assert tills.reservation("b") is None
    assert tills.level(RateKind.REQUESTS) == 59


def test_a_prompt_longer_than_the_limit_passes_once_and_is_paid_in_full(tills: Tills) -> None:
    limit(tills.database, tills.tenant.id, input_tokens_per_minute=60)
    tills.reserve(make_demand("a", input_tokens=90))
    assert tills.level(RateKind.INPUT_TOKENS) == -30
    with pytest.raises(RateLimited) as refused:
        tills.reserve(make_demand("b", input_tokens=1))
    assert refused.value.retry_after_seconds == pytest.approx(31.0)


def test_settling_gives_back_what_was_not_generated(tills: Tills) -> None:
    limit(tills.database, tills.tenant.id, output_tokens_per_minute=100)
    tills.reserve(make_demand(output_tokens=80))
    assert tills.level(RateKind.OUTPUT_TOKENS) == 20
    tills.clock.seconds += 6
    tills.settle("req-1", 10, 15)
    assert tills.level(RateKind.OUTPUT_TOKENS) == 95


def test_of_output_at_most_a_bucket_is_paid_in_advance_and_the_rest_when_it_was_used(
    tills: Tills,
) -> None:
    limit(tills.database, tills.tenant.id, output_tokens_per_minute=100)
    tills.reserve(make_demand(output_tokens=1000))
    assert tills.level(RateKind.OUTPUT_TOKENS) == 0
    tills.settle("req-1", 10, 250)
    assert tills.level(RateKind.OUTPUT_TOKENS) == -150
    tills.reserve(make_demand("generates nothing", output_tokens=0))
    with pytest.raises(RateLimited):
        tills.reserve(make_demand("one token", output_tokens=1))


def test_a_request_that_never_ran_gets_its_tokens_back_once(tills: Tills) -> None:
    limit(tills.database, tills.tenant.id, input_tokens_per_minute=100, output_tokens_per_minute=90)
    tills.reserve(make_demand("a", input_tokens=40, output_tokens=50))
    tills.reserve(make_demand("b", input_tokens=40, output_tokens=40))
    tills.clock.seconds += 6
    for _ in range(3):
        tills.release("a")
    assert tills.level(RateKind.INPUT_TOKENS) == 70
    assert tills.level(RateKind.OUTPUT_TOKENS) == 59


def test_tokens_are_given_back_once_however_many_do_it_at_once(tills: Tills) -> None:
    limit(tills.database, tills.tenant.id, output_tokens_per_minute=1000)
    tills.reserve(make_demand("a", output_tokens=100))
    tills.reserve(make_demand("b", output_tokens=300))
    barrier = Barrier(NUM_THREADS)

    def give_back(_: int) -> None:
        barrier.wait()
        tills.release("a")

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(give_back, range(NUM_THREADS)))
    assert tills.level(RateKind.OUTPUT_TOKENS) == 700


def test_a_limit_set_while_a_request_runs_is_given_nothing_that_was_never_paid(
    tills: Tills,
) -> None:
    limit(tills.database, tills.tenant.id, requests_per_minute=100)
    tills.reserve(make_demand("a", output_tokens=80))
    limit(
        tills.database,
        tills.tenant.id,
        input_tokens_per_minute=100,
        output_tokens_per_minute=100,
    )
    tills.reserve(make_demand("b", input_tokens=100, output_tokens=100))
    tills.settle("a", 10, 30)
    assert tills.level(RateKind.INPUT_TOKENS) == -10
    assert tills.level(RateKind.OUTPUT_TOKENS) == -30


def test_a_lowered_limit_holds_from_the_next_request_on(tills: Tills) -> None:
    limit(tills.database, tills.tenant.id, requests_per_minute=100)
    tills.reserve(make_demand("a"))
    limit(tills.database, tills.tenant.id, requests_per_minute=1)
    tills.reserve(make_demand("b"))
    with pytest.raises(RateLimited, match="The limit is 1 requests per minute: 0 are left"):
        tills.reserve(make_demand("c"))


@pytest.mark.parametrize("jump", [-300.0, 300.0])
def test_a_clock_that_jumps_brings_at_most_a_full_bucket(tills: Tills, jump: float) -> None:
    limit(tills.database, tills.tenant.id, requests_per_minute=4)
    passed = 0
    for number in range(20):
        if number == 10:
            tills.clock.seconds += jump
        try:
            tills.reserve(make_demand(f"req-{number}"))
            passed += 1
        except RateLimited:
            pass
    assert passed == (8 if jump > 0 else 4)


def test_under_another_clock_no_time_has_passed(tills: Tills) -> None:
    limit(tills.database, tills.tenant.id, requests_per_minute=1)
    tills.reserve(make_demand("a"))
    tills.clock = SetClock(seconds=1e9, name="after a restart of the machine")
    with pytest.raises(RateLimited):
        tills.reserve(make_demand("b"))


def test_one_tenants_requests_cost_another_nothing(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    for tenant in (acme, bolt):
        limit(database, tenant.id, requests_per_minute=1, concurrent_requests=1)
    Tills(database, acme).reserve(make_demand("a"))
    Tills(database, bolt).reserve(make_demand("b"))
    with pytest.raises(LimitReached):
        Tills(database, acme).reserve(make_demand("c"))


def test_the_clock_of_both_databases_goes_on(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        first, second = read_clock(session), read_clock(session)
    with database.platform_transaction() as platform_session:
        third = read_clock(platform_session)
    assert first.clock == second.clock == third.clock
    assert first.seconds < second.seconds < third.seconds < first.seconds + 60


# --- requests at once ---------------------------------------------------------------------------


def test_counts_running_requests_until_they_are_settled(tills: Tills) -> None:
    limit(tills.database, tills.tenant.id, concurrent_requests=2)
    for request_id in ("a", "b"):
        tills.reserve(make_demand(request_id))
    with pytest.raises(TooManyRequestsAtOnce, match="2 requests at once"):
        tills.reserve(make_demand("c"))
    tills.settle("a", 1, 1)
    tills.reserve(make_demand("c"))


def test_a_dead_servers_requests_count_until_they_expire(tills: Tills) -> None:
    limit(tills.database, tills.tenant.id, concurrent_requests=1)
    tills.reserve(make_demand("a"))
    tills.clock.seconds += LEASE_SECONDS - 1
    assert tills.num_counted() == 1
    with pytest.raises(TooManyRequestsAtOnce):
        tills.reserve(make_demand("b"))
    tills.clock.seconds += 1
    assert tills.num_counted() == 0
    tills.reserve(make_demand("b"))


def test_a_living_servers_requests_count_for_as_long_as_they_run(tills: Tills) -> None:
    limit(tills.database, tills.tenant.id, concurrent_requests=2)
    tills.reserve(make_demand("a"))
    tills.reserve(make_demand("b"), server_id=OTHER_SERVER)
    for _ in range(5):
        tills.clock.seconds += LEASE_SECONDS - 1
        assert tills.renew() == 1
    assert tills.num_counted() == 1
    with tills.database.platform_transaction(read_only=True) as session:
        mine, others = (quotas.list_of_server(session, at) for at in (SERVER_ID, OTHER_SERVER))
    assert [(row.request_id, row.expires_at - tills.clock.seconds) for row in mine] == [("a", 60.0)]
    assert [row.request_id for row in others] == ["b"]
    tills.reserve(make_demand("c"))
    with pytest.raises(TooManyRequestsAtOnce):
        tills.reserve(make_demand("d"))


def test_a_restart_of_the_machine_ends_what_ran(tills: Tills) -> None:
    limit(tills.database, tills.tenant.id, concurrent_requests=1)
    tills.reserve(make_demand("a"))
    tills.clock = SetClock(seconds=1.0, name="after a restart of the machine")
    tills.reserve(make_demand("b"))
    assert tills.num_counted() == 1, "the new one alone"


def test_what_a_dead_server_reserved_is_given_back_once_however_late(tills: Tills) -> None:
    limit(tills.database, tills.tenant.id, output_tokens_per_minute=600)
    tills.reserve(make_demand("a", output_tokens=600))
    tills.clock.seconds += LEASE_SECONDS
    tills.reserve(make_demand("b", output_tokens=600))
    for _ in range(3):
        tills.settle("a", 10, 100)
    assert tills.level(RateKind.OUTPUT_TOKENS) == 500


def test_what_a_server_reserved_that_never_came_back_is_forgotten_after_a_day(
    tills: Tills,
) -> None:
    limit(tills.database, tills.tenant.id, concurrent_requests=9)
    for request_id in ("young", "old", "old, but runs"):
        tills.reserve(make_demand(request_id))
    with tills.database.platform_transaction() as session:
        for row in session.scalars(select(Reservation)):
            row.created_at -= timedelta(hours=23 if row.request_id == "young" else 25)
    assert tills.purge() == 0, "all are renewed"
    tills.clock.seconds += LEASE_SECONDS
    with tills.database.platform_transaction() as session:
        row = session.get_one(Reservation, "old, but runs")
        row.expires_at += LEASE_SECONDS
    assert tills.purge() == 1
    assert tills.reservation("old") is None
    tills.settle("old", 1, 1)


# --- budgets ------------------------------------------------------------------------------------


def test_a_budget_counts_what_was_used_and_what_may_yet_be(tills: Tills) -> None:
    limit(tills.database, tills.tenant.id, tokens_per_period=100)
    tills.reserve(make_demand("a", input_tokens=10, output_tokens=50))
    for output in (50, 90):
        with pytest.raises(RateLimited, match="running requests may use 60"):
            tills.reserve(make_demand("b", input_tokens=10, output_tokens=output))
    tills.settle("a", 10, 20)
    assert tills.period_tokens() == 30
    tills.reserve(make_demand("b", input_tokens=10, output_tokens=50))
    tills.settle("b", 10, 50)
    with pytest.raises(InsufficientQuota, match="10 are left, and this may use 11"):
        tills.reserve(make_demand("c", input_tokens=1, output_tokens=10))
    tills.reserve(make_demand("c", input_tokens=1, output_tokens=9))


def test_a_request_that_may_use_more_than_the_budget_needs_all_of_it(tills: Tills) -> None:
    limit(tills.database, tills.tenant.id, tokens_per_period=100)
    tills.reserve(make_demand("all", input_tokens=10, output_tokens=500))
    tills.settle("all", 10, 20)
    with pytest.raises(InsufficientQuota, match="70 are left, and this may use 510"):
        tills.reserve(make_demand("more", input_tokens=10, output_tokens=500))


def record_42_tokens(tills: Tills, request_id: str) -> bool:
    """Whether the request's row is new."""
    usage = Usage(
        request_id=request_id,
        prompt_tokens=30,
        cached_tokens=0,
        completion_tokens=12,
        finish_reason="stop",
    )
    with tills.database.transaction(tills.tenant.id) as session:
        return ledger.record(session, usage)


def test_a_budget_begins_with_what_the_ledger_has_of_its_period(tills: Tills) -> None:
    record_42_tokens(tills, "before")
    limit(tills.database, tills.tenant.id, tokens_per_period=100)
    assert tills.period_tokens() == 42
    assert record_42_tokens(tills, "after")
    assert not record_42_tokens(tills, "after")
    assert tills.period_tokens() == 84
    limit(tills.database, tills.tenant.id, tokens_per_period=200)
    assert tills.period_tokens() == 84


def test_a_budget_that_is_set_again_counts_what_was_used_without_one(tills: Tills) -> None:
    limit(tills.database, tills.tenant.id, tokens_per_period=100)
    record_42_tokens(tills, "within the budget")
    limit(tills.database, tills.tenant.id)
    record_42_tokens(tills, "without one")
    limit(tills.database, tills.tenant.id, tokens_per_period=100)
    assert tills.period_tokens() == 84


def test_the_ledgers_rows_count_from_the_periods_beginning_to_before_its_end(
    tills: Tills,
) -> None:
    begin, end = datetime(2026, 4, 1, tzinfo=UTC), datetime(2026, 5, 1, tzinfo=UTC)
    tick = timedelta(microseconds=1)
    with tills.database.transaction(tills.tenant.id) as session:
        for number, moment in enumerate((begin - tick, begin, end - tick, end)):
            session.add(
                UsageRecord(
                    request_id=f"req-{number}",
                    created_at=moment,
                    prompt_tokens=10**number,
                    cached_tokens=0,
                    completion_tokens=10**number,
                    finish_reason="stop",
                )
            )
        session.flush()
        assert repository.sum_ledger_tokens(session, begin, end) == 220


def test_a_new_period_begins_with_the_whole_budget(tills: Tills) -> None:
    limit(tills.database, tills.tenant.id, tokens_per_period=100, period=Period.DAY)
    yesterday = begin_of(Period.DAY, utc_now()) - timedelta(days=1)
    with tills.database.transaction(tills.tenant.id) as session:
        session.add(PeriodUse(period=Period.DAY, begins_at=yesterday, tokens=100))
    tills.reserve(make_demand(input_tokens=50, output_tokens=50))


def test_a_request_counts_in_the_period_in_which_it_ended_however_late_it_is_settled(
    tills: Tills,
) -> None:
    limit(tills.database, tills.tenant.id, tokens_per_period=100, period=Period.DAY)
    yesterday = utc_now() - timedelta(days=1)
    tills.reserve(make_demand("late", input_tokens=10, output_tokens=50))
    tills.settle("late", 10, 20, yesterday)
    assert tills.period_tokens(Period.DAY, yesterday) == 30
    assert tills.period_tokens(Period.DAY) == 0


@pytest.mark.parametrize(
    ("period", "begin", "end"),
    [
        (Period.DAY, datetime(2024, 2, 29, tzinfo=UTC), datetime(2024, 3, 1, tzinfo=UTC)),
        (Period.MONTH, datetime(2024, 2, 1, tzinfo=UTC), datetime(2024, 3, 1, tzinfo=UTC)),
        (Period.MONTH, datetime(2024, 4, 1, tzinfo=UTC), datetime(2024, 5, 1, tzinfo=UTC)),
        (Period.MONTH, datetime(2024, 12, 1, tzinfo=UTC), datetime(2025, 1, 1, tzinfo=UTC)),
    ],
)
def test_periods_begin_and_end_at_midnight(period: Period, begin: datetime, end: datetime) -> None:
    assert begin_of(period, end - timedelta(microseconds=1)) == begin
    assert begin_of(period, begin) == begin
    assert end_of(period, begin) == end


# --- limits -------------------------------------------------------------------------------------


def test_limits_are_replaced_as_a_whole(database: Database, acme: Tenant) -> None:
    limit(database, acme.id, requests_per_minute=5, keys=2)
    limit(database, acme.id, keys=3, period=Period.DAY)
    with database.transaction(acme.id, read_only=True) as session:
        assert quotas.get_limits(session) == Limits(keys=3, period=Period.DAY)


def test_without_limits_there_are_none(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id, read_only=True) as session:
        assert quotas.get_limits(session) == Limits()


def test_limits_may_be_as_high_and_as_low_as_they_can_be(database: Database, acme: Tenant) -> None:
    limits = Limits(
        requests_per_minute=1,
        concurrent_requests=2**31 - 1,
        tokens_per_period=2**53,
        stored_bytes=2**53,
        keys=0,
        users=2**31 - 1,
    )
    with database.transaction(acme.id) as session:
        quotas.set_limits(session, limits)
        assert quotas.get_limits(session) == limits


def test_limits_and_what_is_used_are_as_the_database_has_them_now(
    database: Database, acme: Tenant
) -> None:
    limit(database, acme.id, tokens_per_period=100)
    with database.transaction(acme.id) as session:
        quota, use = (session.scalars(select(table)).one() for table in (Quota, PeriodUse))
        set_committed_value(quota, "tokens_per_period", 1)
        set_committed_value(use, "tokens", 1)
        assert quotas.lock_limits(session).tokens_per_period == 100
        assert quotas.current_use(session).uses["tokens_per_period"].used == 0


@pytest.mark.parametrize(
    "limits",
    [
        {"requests_per_minute": 0},
        {"concurrent_requests": 0},
        {"tokens_per_period": 0},
        {"keys": -1},
        {"users": 2**31},
        {"stored_bytes": 2**53 + 1},
    ],
)
def test_refuses_limits_out_of_range(
    database: Database, acme: Tenant, limits: dict[str, Any]
) -> None:
    with pytest.raises(InvalidValue) as refused:
        limit(database, acme.id, **limits)
    assert refused.value.param == next(iter(limits))


def test_says_what_is_used_of_every_limit(tills: Tills) -> None:
    limit(
        tills.database,
        tills.tenant.id,
        requests_per_minute=6,
        concurrent_requests=5,
        tokens_per_period=1000,
    )
    tills.reserve(make_demand("a", input_tokens=10, output_tokens=20))
    tills.settle("a", 10, 5)
    tills.reserve(make_demand("b", input_tokens=10, output_tokens=20))
    with tills.database.transaction(tills.tenant.id, read_only=True) as session:
        uses = quotas.current_use(session, clock=tills.clock).uses
    requests, tokens = uses["requests_per_minute"], uses["tokens_per_period"]
    assert (requests.used, requests.remaining, requests.reset_seconds) == (2, 4, 20.0)
    assert (tokens.used, tokens.reserved, tokens.remaining) == (15, 30, 955)
    assert uses["concurrent_requests"].remaining == 4
    assert uses["output_tokens_per_minute"].remaining is None
    assert (uses["keys"].limit, uses["keys"].used) == (None, 0)
