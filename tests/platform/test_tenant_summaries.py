"""Lists of tenants with their usage."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.quotas.limits import Limits, set_limits
from loraplex.platform.quotas.models import Period
from loraplex.platform.tenants import service as tenants
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.tenants.summaries import NUM_DAYS, TokenBudget, list_summaries
from loraplex.platform.usage.service import Usage, record

USAGE = Usage(
    request_id="r0", prompt_tokens=70, cached_tokens=5, completion_tokens=30, finish_reason="stop"
)


def test_the_last_days_are_summed_for_each_tenant(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    days = {"today": 0, "first": NUM_DAYS - 1, "before": NUM_DAYS}
    with database.transaction(acme.id) as session:
        for name, age in days.items():
            ended_at = utc_now() - timedelta(days=age)
            assert record(session, replace(USAGE, request_id=name, ended_at=ended_at))
    with database.platform_transaction(read_only=True) as session:
        found = {each.tenant.slug: each for each in list_summaries(session)}
    assert (found["acme"].num_requests, found["acme"].num_tokens) == (2, 200)
    assert (found["bolt"].num_requests, found["bolt"].num_tokens) == (0, 0)


@pytest.mark.parametrize("period", Period)
def test_a_budget_says_what_of_it_is_used(
    database: Database, acme: Tenant, bolt: Tenant, period: Period
) -> None:
    with database.transaction(acme.id) as session:
        record(session, USAGE)
        set_limits(session, Limits(tokens_per_period=1000, period=period))
    with database.transaction(bolt.id) as session:
        set_limits(session, Limits(keys=3))
    with database.platform_transaction(read_only=True) as session:
        found = {each.tenant.slug: each.budget for each in list_summaries(session)}
    assert found == {"acme": TokenBudget(1000, period, 100), "bolt": None}


def test_the_usage_of_an_earlier_period_is_not_counted(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        set_limits(session, Limits(tokens_per_period=1000, period=Period.DAY))
        record(session, replace(USAGE, ended_at=utc_now() - timedelta(days=1)))
    with database.platform_transaction(read_only=True) as session:
        (found,) = list_summaries(session)
    assert found.budget == TokenBudget(1000, Period.DAY, 0)


@pytest.mark.parametrize(
    ("search", "slugs"),
    [
        ("ol", ["bolt"]),
        ("OL", ["bolt"]),
        ("sons", ["bolt"]),
        ("SONS", ["bolt"]),
        ("%", []),
        ("_", []),
        ("c", ["acme", "cord"]),
    ],
)
def test_a_search_finds_parts_of_slug_and_name(
    database: Database, search: str, slugs: list[str]
) -> None:
    with database.platform_transaction() as session:
        tenants.create_tenant(session, "bolt", name="Bolt & Sons")
        tenants.create_tenant(session, "acme")
        tenants.create_tenant(session, "cord")
    with database.platform_transaction(read_only=True) as session:
        found = [each.tenant.slug for each in list_summaries(session, search=search)]
    assert found == slugs
