"""The request log: whose entries are found, in which order, and which are forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from loraplex.platform.database import Database
from loraplex.platform.errors import InvalidValue, RequestNotFound
from loraplex.platform.requests import service as requests
from loraplex.platform.requests import upkeep
from loraplex.platform.requests.models import RequestLogEntry
from loraplex.platform.requests.repository import LogFilter
from loraplex.platform.tenants.models import Tenant

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
ALL = LogFilter()


def make_row(tenant: Tenant, request_id: str, second: int = 0, **changes: Any) -> dict[str, Any]:
    row = dict.fromkeys(RequestLogEntry.__table__.columns.keys())
    row |= {"tenant_id": tenant.id, "request_id": request_id, "route": "/v1/completions"}
    row |= {"created_at": NOON + second * SECOND, "status": 200, "total_ms": 1.5}
    return row | changes


def add(database: Database, *rows: dict[str, Any]) -> None:
    with database.platform_transaction() as session:
        requests.add(session, rows)


def ids(entries: Sequence[RequestLogEntry]) -> str:
    return "".join(entry.request_id for entry in entries)


def listed(database: Database, tenant: Tenant, wanted: LogFilter) -> str:
    with database.transaction(tenant.id, read_only=True) as session:
        return ids(requests.list_newest(session, wanted, limit=9))


def test_a_request_is_found_by_its_tenant_and_for_operators(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    add(database, make_row(acme, "a", first_token_ms=7.5), make_row(bolt, "b"))
    with database.transaction(acme.id, read_only=True) as session:
        found = requests.get(session, "a")
        assert (found.tenant_id, found.created_at) == (acme.id, NOON)
        assert (found.first_token_ms, found.load_ms, found.total_ms) == (7.5, None, 1.5)
        for request_id in ("b", "c"):
            with pytest.raises(RequestNotFound, match=request_id):
                requests.get(session, request_id)
    with database.platform_transaction(read_only=True) as platform:
        assert requests.get_for_any_tenant(platform, "b").tenant_id == bolt.id
        with pytest.raises(RequestNotFound, match="'c'"):
            requests.get_for_any_tenant(platform, "c")


def test_the_newest_come_first_page_by_page(database: Database, acme: Tenant, bolt: Tenant) -> None:
    places = {"a": 1, "b": 3, "c": 2, "d": 2, "e": 2}
    add(database, *(make_row(acme, name, second) for name, second in places.items()))
    add(database, make_row(bolt, "x", 2))
    pages: list[str] = []
    with database.transaction(acme.id, read_only=True) as session:
        before = None
        while page := requests.list_newest(session, ALL, before=before, limit=2):
            pages.append(ids(page))
            before = requests.cursor_of(page[-1])
    assert pages == ["be", "dc", "a"]
    with database.platform_transaction(read_only=True) as platform:
        assert ids(requests.list_newest(platform, ALL, limit=9)) == "bxedca"


@pytest.mark.parametrize("cursor", ["", "~a", "yesterday~a", "2026-03-01T12:00:00~a"])
def test_what_is_no_cursor_is_refused(database: Database, acme: Tenant, cursor: str) -> None:
    with (
        database.transaction(acme.id, read_only=True) as session,
        pytest.raises(InvalidValue) as caught,
    ):
        requests.list_newest(session, ALL, before=cursor, limit=1)
    assert caught.value.param == "after"


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (LogFilter(), "dcba"),
        (LogFilter(adapter="bot"), "ca"),
        (LogFilter(visible=frozenset({"bot"})), "ca"),
        (LogFilter(visible=frozenset({"bot", "sql"})), "cba"),
        (LogFilter(visible=frozenset()), ""),
        (LogFilter(adapter="sql", visible=frozenset({"bot"})), ""),
        (LogFilter(code="overloaded"), "b"),
        (LogFilter(status=0), "c"),
        (LogFilter(since=NOON + SECOND), "dcb"),
        (LogFilter(until=NOON + SECOND), "a"),
    ],
)
def test_a_list_has_what_fits_all_that_is_asked_for(
    database: Database, acme: Tenant, wanted: LogFilter, expected: str
) -> None:
    add(
        database,
        make_row(acme, "a", 0, adapter_name="bot"),
        make_row(acme, "b", 1, adapter_name="sql", status=503, error_code="overloaded"),
        make_row(acme, "c", 2, adapter_name="bot", status=0),
        make_row(acme, "d", 3),
    )
    assert listed(database, acme, wanted) == expected


def test_the_oldest_are_forgotten_first_and_some_at_a_time(
    database: Database, acme: Tenant, bolt: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "ROWS_AT_ONCE", 2)
    add(database, make_row(acme, "c", 2), make_row(acme, "b", 1), make_row(acme, "d", 3))
    add(database, make_row(bolt, "a", 0))
    with database.platform_transaction() as session:
        assert upkeep.purge(session, NOON + 3 * SECOND) == 2
        assert ids(requests.list_newest(session, ALL, limit=9)) == "dc"
        assert upkeep.purge(session, NOON + 3 * SECOND) == 1
        assert upkeep.purge(session, NOON + 3 * SECOND) == 0
        assert ids(requests.list_newest(session, ALL, limit=9)) == "d"
