"""Lists of adapters: searched, sorted, counted, paged, and restricted to the tenant."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters.listing import AdapterOrder, AdapterQuery, list_summaries
from loraplex.platform.adapters.states import VersionState
from loraplex.platform.database import Database
from loraplex.platform.errors import InvalidValue
from loraplex.platform.overview.models import AdapterUse
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant
from support.catalog import make_version
from support.statements import recorded_statements

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
NAMES = ("a", "b-1", "b.2", "c")


def use(session: TenantSession, name: str, *, requests: int, hours: int, p95: float) -> None:
    row = AdapterUse(adapter_name=name, latency_counts={}, p95_ms=p95, num_requests=requests)
    row.last_used_at = NOON + timedelta(hours=hours)
    session.add(row)


@pytest.fixture
def filled(database: Database, acme: Tenant, bolt: Tenant) -> Database:
    """Four adapters of one tenant, and one of another with the name of the first."""
    with database.transaction(acme.id) as session:
        for name in NAMES:
            make_version(session, name, f"{name} one", state=VersionState.READY)
        make_version(session, "b-1", "two", state=VersionState.REJECTED)
        make_version(session, "b-1", "three", state=VersionState.DELETED)
        make_version(session, "gone", "gone", state=VersionState.DELETED)
        catalog.set_alias(session, "b-1", "prod", 1)
        use(session, "a", requests=5, hours=1, p95=10.0)
        use(session, "c", requests=7, hours=2, p95=5.0)
        for hours, name in enumerate(NAMES):
            catalog.get_adapter(session, name).created_at = NOON + timedelta(hours=hours)
    with database.transaction(bolt.id) as session:
        make_version(session, "a", "bolt's", state=VersionState.READY)
        use(session, "a", requests=100, hours=9, p95=99.0)
    return database


def names(database: Database, tenant: Tenant | None, **wanted: Any) -> list[str]:
    """In pages of two, whose cursors lead from one to the next."""
    query, found, after = AdapterQuery(**wanted), [], None
    while True:
        if tenant is None:
            with database.platform_transaction(read_only=True) as session:
                page = list_summaries(session, query, after=after, limit=2)
        else:
            with database.transaction(tenant.id, read_only=True) as own:
                page = list_summaries(own, query, after=after, limit=2)
        found += [f"{row.tenant_slug}/{row.adapter.name}" for row in page]
        if len(page) < 2:
            return found
        after = page[-1].cursor


def test_pages_come_in_the_order_that_is_wanted(filled: Database, acme: Tenant) -> None:
    for order, expected in (
        (AdapterOrder.NAME, ["a", "b-1", "b.2", "c"]),
        (AdapterOrder.NAME_DOWN, ["c", "b.2", "b-1", "a"]),
        (AdapterOrder.CREATED, ["c", "b.2", "b-1", "a"]),
        (AdapterOrder.LAST_USED, ["c", "a", "b-1", "b.2"]),
        (AdapterOrder.REQUESTS, ["c", "a", "b-1", "b.2"]),
        (AdapterOrder.P95, ["a", "c", "b-1", "b.2"]),
    ):
        found = names(filled, acme, order=order)
        assert found == [f"acme/{name}" for name in expected], order


def test_most_bytes_come_first(filled: Database, acme: Tenant) -> None:
    assert names(filled, acme, order=AdapterOrder.BYTES)[0] == "acme/b-1", "it has two versions"


def test_an_operator_sees_all_tenants_or_one(filled: Database) -> None:
    everybody = ["acme/a", "bolt/a", "acme/b-1", "acme/b.2", "acme/c"]
    assert names(filled, None) == everybody
    assert names(filled, None, order=AdapterOrder.NAME_DOWN) == everybody[::-1]
    assert names(filled, None, tenant_slug="bolt") == ["bolt/a"]
    assert names(filled, None, order=AdapterOrder.REQUESTS)[0] == "bolt/a"


def test_only_what_is_wanted_is_listed(filled: Database, acme: Tenant) -> None:
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"search": "b"}, ["b-1", "b.2"]),
        ({"search": "B."}, ["b.2"]),
        ({"search": "%"}, []),
        ({"search": "_"}, []),
        ({"state": VersionState.READY}, ["a", "b.2", "c"]),
        ({"state": VersionState.REJECTED}, ["b-1"]),
        ({"names": {"a", "c"}}, ["a", "c"]),
        ({"names": set()}, []),
    ]
    for wanted, expected in cases:
        assert names(filled, acme, **wanted) == [f"acme/{name}" for name in expected], wanted


def test_a_row_has_what_belongs_to_its_adapter(filled: Database, acme: Tenant) -> None:
    with filled.transaction(acme.id, read_only=True) as session:
        first, second, *_ = list_summaries(session, AdapterQuery(), limit=10)
    assert (first.num_requests, first.p95_ms) == (5, 10.0)
    assert first.last_used_at == NOON + timedelta(hours=1)
    assert (second.num_versions, second.latest.number) == (2, 2)
    assert second.latest.state is VersionState.REJECTED
    assert (second.aliases, second.canaries) == ({"prod": 1}, {})
    assert len(second.contents) == 2
    assert (second.num_requests, second.last_used_at, second.p95_ms) == (0, None, None)


# The last is of the right form, and its name is a text that no database takes: "\\ud800".
@pytest.mark.parametrize(
    "after", ["", "x", "eA==", "WyJuYW1lIl0=", "W10=", "WyJuYW1lIiwwLCJcdWQ4MDAiLCJhY21lIl0="]
)
def test_a_cursor_of_another_list_is_refused(after: str, database: Database, acme: Tenant) -> None:
    with (
        database.transaction(acme.id, read_only=True) as session,
        pytest.raises(InvalidValue, match="next_after"),
    ):
        list_summaries(session, AdapterQuery(), after=after, limit=2)


def test_a_page_takes_as_many_statements_however_long_it_is(filled: Database, acme: Tenant) -> None:
    def num_statements(limit: int) -> int:
        with (
            filled.transaction(acme.id, read_only=True) as session,
            recorded_statements(session) as statements,
        ):
            list_summaries(session, AdapterQuery(), limit=limit)
            return len(statements)

    assert num_statements(1) == num_statements(4) <= 5
