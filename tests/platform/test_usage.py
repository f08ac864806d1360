"""The ledger counts each request once and sums by tenant and adapter."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy.exc import IntegrityError

from loraplex.platform.adapters.registry import AdapterRef, parse_model_name, resolve
from loraplex.platform.database import Database
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.usage import repository
from loraplex.platform.usage import service as usage
from loraplex.platform.usage.repository import UsageTotal
from loraplex.platform.usage.service import Usage
from support.catalog import BASE_ID, make_version

BASE_USAGE = Usage(
    request_id="request-1",
    adapter=None,
    prompt_tokens=10,
    cached_tokens=4,
    completion_tokens=3,
    tier=None,
    finish_reason="stop",
)


def make_reference(database: Database, tenant: Tenant, name: str) -> AdapterRef:
    with database.transaction(tenant.id) as session:
        make_version(session, name)
        return resolve(session, parse_model_name(name), tenant_slug=tenant.slug, base_id=BASE_ID)


def record(database: Database, tenant: Tenant, used: Usage) -> bool:
    with database.transaction(tenant.id) as session:
        return usage.record(session, used)


def test_keeps_what_was_used(database: Database, acme: Tenant) -> None:
    reference = make_reference(database, acme, "sql")
    assert record(database, acme, replace(BASE_USAGE, adapter=reference, tier="resident"))
    with database.transaction(acme.id, read_only=True) as session:
        row = repository.find(session, "request-1")
    assert row is not None
    assert (row.adapter_name, row.adapter_version, row.adapter_digest) == (
        "sql",
        1,
        reference.key.digest,
    )
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (10, 4, 3)
    assert (row.tier, row.finish_reason) == ("resident", "stop")


def test_counts_a_request_once(database: Database, acme: Tenant) -> None:
    assert record(database, acme, BASE_USAGE)
    assert not record(database, acme, replace(BASE_USAGE, completion_tokens=99))
    with database.transaction(acme.id, read_only=True) as session:
        row = repository.find(session, "request-1")
    assert row is not None
    assert row.completion_tokens == 3


def test_a_repeated_request_does_not_spoil_its_unit_of_work(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        news = [
            usage.record(session, replace(BASE_USAGE, request_id=request_id))
            for request_id in ("a", "b", "a", "c")
        ]
    assert news == [True, True, False, True]
    with database.transaction(acme.id, read_only=True) as session:
        assert repository.find(session, "c")


def test_does_not_take_another_tenants_request_for_its_own(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    record(database, acme, BASE_USAGE)
    with pytest.raises(IntegrityError):
        record(database, bolt, BASE_USAGE)


@pytest.mark.parametrize(
    "change", [{"prompt_tokens": -1}, {"completion_tokens": -1}, {"cached_tokens": 11}]
)
def test_refuses_impossible_counts(
    database: Database, acme: Tenant, change: dict[str, int]
) -> None:
    with pytest.raises(IntegrityError):
        record(database, acme, replace(BASE_USAGE, **change))  # type: ignore[arg-type]


def test_sums_by_adapter_and_tenant(database: Database, acme: Tenant, bolt: Tenant) -> None:
    began = datetime.now(UTC)
    for tenant in (acme, bolt):
        reference = make_reference(database, tenant, "sql")
        for number, adapter in enumerate((None, reference, reference)):
            request_id = f"{tenant.slug}-{number}"
            record(database, tenant, replace(BASE_USAGE, request_id=request_id, adapter=adapter))
    since, until = began - timedelta(seconds=1), datetime.now(UTC) + timedelta(seconds=1)
    of_acme = [UsageTotal("acme", None, 1, 10, 4, 3), UsageTotal("acme", "sql", 2, 20, 8, 6)]
    of_bolt = [total._replace(tenant_slug="bolt") for total in of_acme]
    with database.transaction(acme.id, read_only=True) as session:
        assert usage.sum_by_adapter(session, since=since, until=until) == of_acme
        assert usage.sum_by_adapter(session, since=since, until=since) == []
    with database.platform_transaction(read_only=True) as session:
        totals = usage.sum_by_adapter_of_all_tenants(session, since=since, until=until)
    assert totals == of_acme + of_bolt
