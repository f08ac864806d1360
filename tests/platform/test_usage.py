"""The ledger counts each request once, and its daily sums equal its rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from loraplex.platform.adapters import service as catalog
from loraplex.platform.database import Database
from loraplex.platform.errors import RequestNotFound
from loraplex.platform.sessions import ScopeViolation
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.usage import service as usage
from loraplex.platform.usage.models import UsageDay, UsageRecord
from loraplex.platform.usage.repository import NOTHING, DeviceUsage, Group, UsageQuery
from loraplex.platform.usage.service import Usage
from support.catalog import make_digest, make_tenant, make_version
from support.databases import copy_of_migrated_sqlite, empty_all_tables

BASE_USAGE = Usage(
    request_id="request-1",
    prompt_tokens=10,
    cached_tokens=4,
    completion_tokens=3,
    finish_reason="stop",
)
ADAPTER_USAGE = replace(
    BASE_USAGE, adapter_name="sql", adapter_version=1, adapter_digest="sha256:1", tier="device"
)
DAY = date(2026, 3, 1)


def record(database: Database, tenant: Tenant, used: Usage) -> bool:
    with database.transaction(tenant.id) as session:
        return usage.record(session, used)


def find(database: Database, tenant: Tenant, request_id: str) -> UsageRecord:
    with database.transaction(tenant.id, read_only=True) as session:
        return usage.get_record(session, request_id)


def test_keeps_what_was_used(database: Database, acme: Tenant, bolt: Tenant) -> None:
    used = replace(ADAPTER_USAGE, key_id="abc", load_ms=1.5)
    assert record(database, acme, used)
    row = find(database, acme, "request-1")
    assert (row.adapter_name, row.adapter_version, row.adapter_digest) == ("sql", 1, "sha256:1")
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (10, 4, 3)
    assert (row.tier, row.finish_reason, row.key_id, row.load_ms) == ("device", "stop", "abc", 1.5)
    assert row.created_at == used.ended_at
    for tenant, request_id in ((bolt, "request-1"), (acme, "request-2")):
        with pytest.raises(RequestNotFound):
            find(database, tenant, request_id)


def test_counts_a_request_once(database: Database, acme: Tenant) -> None:
    assert record(database, acme, BASE_USAGE)
    assert not record(database, acme, replace(BASE_USAGE, completion_tokens=99))
    assert find(database, acme, "request-1").completion_tokens == 3
    with database.transaction(acme.id, read_only=True) as session:
        (sums,) = usage.sum_usage(session, UsageQuery(()))
    assert (sums.num_requests, sums.completion_tokens) == (1, 3)


def test_a_repeated_request_does_not_spoil_its_unit_of_work(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        news = [
            usage.record(session, replace(BASE_USAGE, request_id=request_id))
            for request_id in ("a", "b", "a", "c")
        ]
    assert news == [True, True, False, True]
    assert find(database, acme, "c")


def test_does_not_take_another_tenants_request_for_its_own(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    record(database, acme, BASE_USAGE)
    with pytest.raises(ScopeViolation):
        record(database, bolt, BASE_USAGE)


@pytest.mark.parametrize(
    "change", [{"prompt_tokens": -1}, {"completion_tokens": -1}, {"cached_tokens": 11}]
)
def test_refuses_impossible_counts(
    database: Database, acme: Tenant, change: dict[str, int]
) -> None:
    with pytest.raises(IntegrityError):
        record(database, acme, replace(BASE_USAGE, **change))  # type: ignore[arg-type]


usages = st.builds(
    Usage,
    request_id=st.uuids().map(str),
    adapter_name=st.sampled_from([None, "bot", "sql"]),
    adapter_version=st.integers(1, 2),
    prompt_tokens=st.integers(4, 9),
    cached_tokens=st.integers(0, 4),
    completion_tokens=st.integers(0, 9),
    finish_reason=st.just("stop"),
    load_ms=st.sampled_from([None, 0.0, 7.0]),
    # Evenings and mornings, some of them told in another zone.
    ended_at=st.datetimes(datetime(2026, 2, 28, 22), datetime(2026, 3, 2, 2)).map(
        lambda moment: moment.replace(tzinfo=UTC)
    ),
).map(lambda used: used if used.adapter_name else replace(used, adapter_version=None))


@pytest.fixture(scope="module")
def own_database(tmp_path_factory: pytest.TempPathFactory) -> Database:
    return Database(copy_of_migrated_sqlite(tmp_path_factory.mktemp("usage")))


@given(
    of_acme=st.lists(usages, max_size=12),
    of_bolt=st.lists(usages, max_size=4),
    groups=st.sets(st.sampled_from(list(Group))),
    since=st.none() | st.dates(date(2026, 2, 28), date(2026, 3, 2)),
    until=st.none() | st.dates(date(2026, 2, 28), date(2026, 3, 3)),
    limit=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_sums_by_day_are_sums_of_the_rows_page_by_page(
    own_database: Database,
    of_acme: list[Usage],
    of_bolt: list[Usage],
    groups: set[Group],
    since: date | None,
    until: date | None,
    limit: int,
) -> None:
    empty_all_tables(own_database)
    expected: Counter[tuple[object, ...]] = Counter()
    ordered = tuple(group for group in Group if group in groups)
    for slug, useds in (("acme", of_acme), ("bolt", of_bolt)):
        tenant = make_tenant(own_database, slug)
        for used in useds:
            record(own_database, tenant, used)
            day = used.ended_at.date()
            if (since is None or day >= since) and (until is None or day < until):
                of = {
                    Group.TENANT: slug,
                    Group.DAY: day,
                    Group.ADAPTER: used.adapter_name or "",
                    Group.VERSION: used.adapter_version or 0,
                }
                key = tuple(of[group] for group in ordered)
                amounts = {
                    "requests": 1,
                    "prompt": used.prompt_tokens,
                    "cached": used.cached_tokens,
                    "completion": used.completion_tokens,
                    "cold": used.load_ms == 7.0,
                }
                expected.update({(*key, name): amount for name, amount in amounts.items()})
    found: Counter[tuple[object, ...]] = Counter()
    query = UsageQuery(ordered, since, until, limit=limit)
    keys = []
    while True:
        with own_database.platform_transaction(read_only=True) as session:
            page = usage.sum_usage_of_all_tenants(session, query)
        for row in page:
            keys.append(row.key)
            names = ("requests", "prompt", "cached", "completion", "cold")
            found.update({(*row.key, name): n for name, n in zip(names, row[1:], strict=False)})
        if len(page) < limit or not ordered:
            break
        query = query._replace(after=page[-1].key)
    assert +found == +expected
    assert keys == sorted(set(keys))


def test_a_tenant_sees_its_own_sums_of_the_adapters_it_asks_for(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    for number, name in enumerate([None, "sql", "bot"]):
        used = replace(ADAPTER_USAGE, request_id=f"{number}", adapter_name=name)
        record(database, acme, used)
        record(database, bolt, replace(used, request_id=f"bolt-{number}"))

    def names(**change: Any) -> list[object]:
        query = UsageQuery((Group.ADAPTER,))._replace(**change)
        with database.transaction(acme.id, read_only=True) as session:
            sums = usage.sum_usage(session, query)
        assert {entry.num_requests for entry in sums} <= {1}
        return [entry.key[0] for entry in sums]

    assert names() == ["", "bot", "sql"]
    assert names(adapter_name="") == [""]
    assert names(adapter_name="sql") == ["sql"]
    assert names(adapter_name="none") == []


def test_the_sums_of_all_tenants_narrow_to_one(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    record(database, acme, replace(BASE_USAGE, completion_tokens=5))
    record(database, bolt, replace(BASE_USAGE, request_id="bolt's", completion_tokens=8))
    with database.platform_transaction(read_only=True) as session:
        sums = {
            slug: [
                each.completion_tokens
                for each in usage.sum_usage_of_all_tenants(
                    session, UsageQuery((), tenant_slug=slug)
                )
            ]
            for slug in ("acme", "bolt", None)
        }
    assert sums == {"acme": [5], "bolt": [8], None: [13]}


def test_what_requests_have_used_and_cost_is_summed(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    large = 3 * 10**17  # sums of it do not fit 64 bits everywhere
    used = replace(
        ADAPTER_USAGE,
        step_nanoseconds=1_500_000_000,
        kv_byte_seconds=large,
        loaded_bytes=70,
        fetched_bytes=60,
        amount=500,
        cost=700,
    )
    for number in range(2):
        assert record(database, acme, replace(used, request_id=f"request-{number}"))
    assert not record(database, acme, replace(used, request_id="request-0")), "it is counted once"
    assert record(database, bolt, replace(used, request_id="other", cost=1))
    row = find(database, acme, "request-1")
    assert (row.step_nanoseconds, row.kv_byte_seconds) == (1_500_000_000, large)
    assert (row.loaded_bytes, row.fetched_bytes, row.cost) == (70, 60, 700)
    with database.transaction(acme.id, read_only=True) as session:
        (sums,) = usage.sum_usage(session, UsageQuery((Group.VERSION,)))
    assert (sums.step_nanoseconds, sums.kv_byte_seconds) == (3_000_000_000, 2 * large)
    assert (sums.loaded_bytes, sums.fetched_bytes) == (140, 120)
    assert (sums.amount, sums.cost) == (1000, 1400)


def test_without_usage_all_sums_are_zero(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id, read_only=True) as session:
        assert usage.sum_usage(session, UsageQuery(())) == [NOTHING]


def test_device_usage_counts_for_the_lowest_version_that_is_left(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        make_version(session, "sql", "old")
        make_version(session, "sql", "same")
        version_id = make_version(session, "bot", "same").id
    digest = make_digest("same")

    def add(day: date, amount: int) -> None:
        with database.transaction(acme.id) as session:
            gone = DeviceUsage(day, make_digest("never seen"), 5)
            parts = [DeviceUsage(day, digest, part) for part in (amount - 2, 2)]
            usage.add_device_usage(session, [gone, *parts])

    add(DAY, 70)
    add(DAY, 7)
    with database.transaction(acme.id) as session:
        catalog.begin_version_deletion(session, "bot", 1)
        catalog.finish_deletion(session, version_id)
    add(DAY + timedelta(days=1), 100)
    with database.transaction(acme.id, read_only=True) as session:
        rows = session.scalars(select(UsageDay).order_by(UsageDay.day)).all()
    assert [(row.adapter_name, row.adapter_version) for row in rows] == [("bot", 1), ("sql", 2)]
    assert [row.residency_byte_seconds for row in rows] == [77, 100]
    assert [row.num_requests for row in rows] == [0, 0]
