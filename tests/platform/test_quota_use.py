"""What a tenant is told of its limits and of what is left."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from loraplex.platform.database import Database
from loraplex.platform.quotas import service as quotas
from loraplex.platform.quotas.bucket import Reading
from loraplex.platform.quotas.clock import DATABASE_CLOCK
from loraplex.platform.quotas.models import Period, RateKind
from loraplex.platform.quotas.service import RateStanding
from loraplex.platform.tenants.models import Tenant
from support.catalog import make_version
from support.limits import limit


@pytest.mark.parametrize(
    ("period", "begin", "end"),
    [
        (Period.DAY, datetime(2026, 4, 15, tzinfo=UTC), datetime(2026, 4, 16, tzinfo=UTC)),
        (Period.MONTH, datetime(2026, 4, 1, tzinfo=UTC), datetime(2026, 5, 1, tzinfo=UTC)),
    ],
)
def test_says_when_the_budget_begins_and_ends(
    database: Database, acme: Tenant, period: Period, begin: datetime, end: datetime
) -> None:
    limit(database, acme.id, tokens_per_period=5, period=period)
    now = datetime(2026, 4, 15, 23, 59, tzinfo=UTC)
    reading = Reading(DATABASE_CLOCK, now.timestamp())
    with database.transaction(acme.id, read_only=True) as session:
        use = quotas.current_use(session, clock=lambda _: reading)
    assert (use.period_begins_at, use.period_ends_at) == (begin, end)
    assert use.uses["tokens_per_period"].used == 0


def test_says_what_is_left_of_each_resource_and_never_less_than_nothing(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        make_version(session, "a", "one")
        make_version(session, "a", "three")
    limit(database, acme.id, adapters=3, versions_per_adapter=1, stored_bytes=10, users=2)
    with database.transaction(acme.id, read_only=True) as session:
        uses = quotas.current_use(session).uses
    names = ("adapters", "versions_per_adapter", "stored_bytes", "users", "keys")
    assert [uses[name].used for name in names] == [1, 2, 8, 0, 0]
    assert [uses[name].remaining for name in names] == [2, 0, 2, 2, None]
    for name in ("concurrent_requests", "tokens_per_period"):
        assert (uses[name].limit, uses[name].used) == (None, None)


def test_the_tightest_token_rate_is_that_with_less_left_whatever_its_limit() -> None:
    spent, fresh = RateStanding(100, 5, 57.0), RateStanding(50, 50, 0.0)
    requests = RateStanding(2, 1, 30.0)
    standing = {
        RateKind.REQUESTS: requests,
        RateKind.INPUT_TOKENS: spent,
        RateKind.OUTPUT_TOKENS: fresh,
    }
    assert quotas.tightest_token_rate(standing) == spent
    assert quotas.tightest_token_rate({RateKind.REQUESTS: requests}) is None
