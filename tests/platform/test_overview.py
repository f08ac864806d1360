"""Time series: what servers write is what is read."""

from __future__ import annotations

import random
from collections import Counter
from datetime import timedelta

import numpy as np
import pytest
from sqlalchemy import func, select, update

from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.overview import recent_requests, service
from loraplex.platform.overview.figures import FigureSums
from loraplex.platform.overview.latencies import NUM_BUCKETS, bucket_of, percentile
from loraplex.platform.overview.models import AdapterUse, ServerSample, TenantSample
from loraplex.platform.overview.recent_requests import COUNTED_DAYS
from loraplex.platform.overview.service import RANGES, Gathered, UseSums, Window
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.usage.models import UsageDay

NOON = 1_767_268_800
HERE, THERE = "server-1", "server-2"


def counted(milliseconds: list[float]) -> dict[str, int]:
    figures = FigureSums()
    for each in milliseconds:
        figures.first_token_came(each / 1000)
    return dict(figures.first_token_counts)


@pytest.mark.parametrize("seed", range(3))
def test_percentiles_are_those_of_the_values_within_a_tenth(seed: int) -> None:
    generator = random.Random(seed)
    values = [generator.lognormvariate(4.0, 1.2) for _ in range(2000)]
    for fraction in (0.5, 0.95, 0.99):
        found = percentile(counted(values), fraction)
        assert found == pytest.approx(float(np.quantile(values, fraction)), rel=0.1)


@pytest.mark.parametrize("milliseconds", [0.0, 0.05, 0.1, 1.0, 60_000.0, 1e12])
def test_every_time_has_a_bucket(milliseconds: float) -> None:
    assert 0 <= int(bucket_of(milliseconds)) < NUM_BUCKETS
    found = percentile(counted([milliseconds]), 0.5)
    assert found is not None
    if 0.1 < milliseconds < 1e6:
        assert found == pytest.approx(milliseconds, rel=0.2)


def test_nothing_has_no_percentile() -> None:
    assert percentile({}, 0.5) is None


def gathered(tenant: Tenant, tokens: int, running: float = 0.0) -> Gathered:
    """One request of the tenant with so many tokens, on a server of 100 blocks for 15 s."""

    def figures() -> FigureSums:
        made = FigureSums(num_requests=1, output_tokens=tokens, running_seconds=15 * running)
        made.first_token_came(0.1)
        made.objective_judged("tenant", "met" if tokens < 20 else "itl")
        return made

    return Gathered(figures(), 1500.0, {tenant.id: figures()})


def add(database: Database, moment: float, server: str, what: Gathered) -> None:
    with database.platform_transaction() as session:
        service.add(session, server, moment, what)


def test_steps_and_servers_are_added_up(database: Database, acme: Tenant, bolt: Tenant) -> None:
    for second in range(0, 120, 15):
        add(database, NOON + second, HERE, gathered(acme, 10, running=2))
        add(database, NOON + second, THERE, gathered(bolt, 30, running=1))
    for name, num_steps in (("15m", 8), ("1h", 2), ("6h", 1), ("24h", 1), ("7d", 1)):
        window = Window(RANGES[name], NOON + 119)
        with database.platform_transaction(read_only=True) as session:
            steps = service.read_platform(session, window)
            tokens = service.read_tokens(session, window, 10)
        with database.transaction(acme.id, read_only=True) as session:
            own = service.read_tenant(session, window)
        assert len(steps) == len(own) == len(window.beginnings) <= 120
        present = [step for step in steps if step.kv_capacity_seconds]
        assert len(present) == num_steps, name
        assert sum(step.figures.output_tokens for step in steps) == 8 * 40
        assert sum(step.figures.running_seconds for step in steps) == 8 * 45
        assert sum(step.figures.first_token_counts.total() for step in steps) == 16
        assert sum(figures.output_tokens for figures in own) == 8 * 10
        assert [(each.slug, each.total) for each in tokens] == [("bolt", 240), ("acme", 80)]
        assert [sum(each.by_step) for each in tokens] == [240, 80]
        assert [(each.num_met, each.num_judged) for each in tokens] == [(0, 8), (8, 8)]
        results = sum((step.figures.objective_counts for step in steps), Counter())
        assert results == {"tenant/met": 8, "tenant/itl": 8}


def test_the_attained_share_counts_steps_in_which_a_tenant_got_no_tokens(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    """A full server refuses all requests of a step."""
    refused = FigureSums(num_requests=1)
    refused.objective_judged("tenant", "refused")
    add(database, NOON + 1, HERE, gathered(acme, 10))
    add(database, NOON + 16, HERE, Gathered(refused, 1500.0, {acme.id: refused, bolt.id: refused}))
    with database.platform_transaction(read_only=True) as session:
        tokens = service.read_tokens(session, Window(RANGES["15m"], NOON + 20), 10)
    (of_acme,) = tokens
    assert (of_acme.slug, of_acme.num_met, of_acme.num_judged) == ("acme", 1, 2)


def test_a_step_may_be_added_to_many_times(database: Database, acme: Tenant) -> None:
    for _ in range(5):
        add(database, NOON + 1, HERE, gathered(acme, 1))
    with database.platform_transaction(read_only=True) as session:
        assert session.scalar(select(func.count()).select_from(ServerSample)) == 3
        assert session.scalar(select(func.count()).select_from(TenantSample)) == 3
        (row,) = session.scalars(select(TenantSample).where(TenantSample.step_seconds == 15))
        assert (row.num_requests, row.output_tokens) == (5, 5)
        assert sum(row.first_token_counts.values()) == 5


def test_a_row_without_counts_of_objectives_is_read_and_added_to(
    database: Database, acme: Tenant
) -> None:
    """A server before the upgrade has written it."""
    add(database, NOON + 1, HERE, gathered(acme, 1))
    with database.platform_transaction() as session:
        session.execute(update(TenantSample).values(objective_counts=None, num_judged=0, num_met=0))
    window = Window(RANGES["15m"], NOON + 2)
    for expected in ({}, {"tenant/met": 1}):
        with database.transaction(acme.id, read_only=True) as session:
            counts = sum(
                (each.objective_counts for each in service.read_tenant(session, window)), Counter()
            )
        assert counts == expected
        add(database, NOON + 1, HERE, gathered(acme, 1))


def test_what_is_kept_no_longer_is_dropped_and_the_coarse_stays(
    database: Database, acme: Tenant
) -> None:
    add(database, NOON, HERE, gathered(acme, 1))

    def kept(hours: float) -> set[int]:
        with database.platform_transaction() as session:
            service.purge(session, NOON + 3600 * hours)
            return set(session.scalars(select(TenantSample.step_seconds)))

    assert kept(0.5) == {15, 60, 900}
    assert kept(2) == {60, 900}
    assert kept(13) == {900}
    assert kept(7 * 24) == {900}
    assert kept(9 * 24) == set()


def test_an_adapters_use_is_its_latest_and_forgets_the_past(
    database: Database, acme: Tenant
) -> None:
    def use(milliseconds: float, count: int) -> None:
        what = UseSums(utc_now(), {bucket_of(milliseconds): count})
        add(database, NOON, HERE, Gathered(uses={(acme.id, "bot"): what}))

    use(10.0, 400)
    use(1000.0, 10)
    with database.transaction(acme.id, read_only=True) as session:
        first = session.get_one(AdapterUse, (acme.id, "bot"))
        assert first.p95_ms == pytest.approx(10.0, rel=0.2)
        before = first.last_used_at
    for _ in range(20):
        use(1000.0, 200)
    with database.transaction(acme.id, read_only=True) as session:
        row = session.get_one(AdapterUse, (acme.id, "bot"))
        assert row.p95_ms == pytest.approx(1000.0, rel=0.2)
        assert sum(row.latency_counts.values()) <= 1000
        assert row.last_used_at > before


def test_requests_of_the_last_days_are_those_of_the_ledger(
    database: Database, acme: Tenant
) -> None:
    """As of the latest use; when nobody asks any more, as of the latest count."""
    today = utc_now().date()

    def ask(requests: int, back: int) -> None:
        with database.transaction(acme.id) as session:
            day = UsageDay.begin(today - timedelta(days=back), "bot", 1)
            day.num_requests = requests
            session.add(day)

    def shown() -> int:
        with database.transaction(acme.id, read_only=True) as session:
            return session.get_one(AdapterUse, (acme.id, "bot")).num_requests

    ask(1000, back=COUNTED_DAYS)
    ask(7, back=COUNTED_DAYS - 1)
    use = UseSums(utc_now(), {bucket_of(10.0): 1})
    add(database, NOON, HERE, Gathered(uses={(acme.id, "bot"): use}))
    assert shown() == 7
    ask(5, back=0)
    with database.platform_transaction() as session:
        assert recent_requests.users(session) == [acme.id]
        recent_requests.recount(session, acme.id)
    assert shown() == 7 + 5
