"""The rows of a deleted tenant are erased, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import delete as sql_delete
from sqlalchemy import func, select, update

from loraplex.platform.database import Database
from loraplex.platform.errors import TenantDeletionNotFound, TenantExists, TenantNotFound
from loraplex.platform.keys.models import ApiKey
from loraplex.platform.models import Base, Tenant, TenantDeletion, UsageRecord
from loraplex.platform.sessions import PlatformSession
from loraplex.platform.tenants import deletion as service
from loraplex.platform.tenants import repository
from loraplex.platform.tenants.service import create_tenant, get_tenant
from support.filled_tables import fill_tables

GONE, STAYS = "1", "0"
"""Ids and slugs of two filled tenants."""
TABLES = [table for table in Base.metadata.sorted_tables if "tenant_id" in table.columns]


@pytest.fixture
def filled(database: Database) -> Database:
    """Three tenants with a row in every table, of which none is being deleted."""
    with database.platform_transaction() as session:
        fill_tables(session.connection(), 3)
        session.execute(sql_delete(TenantDeletion))
        session.execute(update(Tenant).values(deleting_at=None))
    return database


def erase(database: Database, deletion_id: str, *, with_usage: bool) -> None:
    """Every step, each in a unit of work of its own."""

    def repeat(step: Callable[[PlatformSession], bool]) -> None:
        is_unfinished = True
        while is_unfinished:
            with database.platform_transaction() as session:
                is_unfinished = step(session)

    repeat(lambda session: service.forget_callers(session, deletion_id))
    for table in service.tables_to_erase(with_usage=with_usage):
        repeat(lambda session, table=table: service.erase_rows(session, deletion_id, table))  # type: ignore[misc]
    with database.platform_transaction() as session:
        service.finish(session, deletion_id)


def _names(table: type[Base]) -> list[str]:
    return [column.name for column in table.__table__.columns]


def delete(database: Database, slug: str, *, with_usage: bool) -> TenantDeletion:
    with database.platform_transaction() as session:
        deletion_id = service.begin(session, slug, with_usage=with_usage).id
    erase(database, deletion_id, with_usage=with_usage)
    with database.platform_transaction(read_only=True) as session:
        return service.get(session, deletion_id)


def contents(database: Database, *, but: str) -> dict[str, list[Any]]:
    """All rows of all tables, without those of one tenant."""
    with database.platform_transaction(read_only=True) as session:
        rows = {
            table.name: [dict(row._mapping) for row in session.execute(select(table))]
            for table in Base.metadata.sorted_tables
        }
    return {
        name: [row for row in of_table if but not in (row.get("tenant_id"), row.get("id"))]
        for name, of_table in rows.items()
    }


def num_rows(database: Database, tenant_id: str) -> dict[str, int]:
    """By table, of those with any."""
    with database.platform_transaction(read_only=True) as session:
        counted = {
            table.name: session.scalar(
                select(func.count()).select_from(table).where(table.c.tenant_id == tenant_id)
            )
            for table in TABLES
        }
    return {name: count for name, count in counted.items() if count}


def test_everything_of_the_tenant_goes_and_nothing_of_another_one(filled: Database) -> None:
    before = contents(filled, but=GONE)
    deletion = delete(filled, GONE, with_usage=True)
    assert num_rows(filled, GONE) == {}
    assert contents(filled, but=GONE) == before
    assert deletion.receipt["rows"] == {table.name: 1 for table in TABLES}
    assert deletion.finished_at is not None


def test_the_ledger_stays_without_users_and_keys(filled: Database) -> None:
    deletion = delete(filled, GONE, with_usage=False)
    assert num_rows(filled, GONE) == dict.fromkeys(service.LEDGER, 1)
    assert deletion.receipt["rows"].keys().isdisjoint(service.LEDGER)
    with filled.platform_transaction(read_only=True) as session:
        (row,) = session.scalars(select(UsageRecord).where(UsageRecord.tenant_id == GONE))
        (other,) = session.scalars(select(UsageRecord).where(UsageRecord.tenant_id == STAYS))
    assert (row.key_id, row.user_id) == (None, None)
    assert (row.prompt_tokens, row.amount) == (2, 2)
    assert None not in (other.key_id, other.user_id)


def test_a_deletion_that_is_repeated_from_the_start_counts_each_row_once(
    filled: Database,
) -> None:
    first = delete(filled, GONE, with_usage=True)
    erase(filled, GONE, with_usage=True)
    with filled.platform_transaction(read_only=True) as session:
        again = service.get(session, GONE)
    assert (again.receipt, again.finished_at) == (first.receipt, first.finished_at)


def test_rows_are_erased_in_steps(filled: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ROWS_PER_STEP", 2)
    with filled.platform_transaction() as session:
        (row,) = session.scalars(select(UsageRecord).where(UsageRecord.tenant_id == GONE))
        values = {name: getattr(row, name) for name in _names(UsageRecord)}
        for number in range(4):
            session.add(UsageRecord(**{**values, "request_id": f"more-{number}"}))
        service.begin(session, GONE, with_usage=True)

    def step() -> bool:
        with filled.platform_transaction() as session:
            return service.erase_rows(session, GONE, "usage_records")

    left = []
    while step():
        left.append(num_rows(filled, GONE).get("usage_records", 0))
    assert left == [3, 1, 0]
    with filled.platform_transaction(read_only=True) as session:
        assert service.get(session, GONE).receipt == {"rows": {"usage_records": 5}}


def test_keys_that_succeeded_each_other_are_erased(
    filled: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "ROWS_PER_STEP", 1)
    with filled.platform_transaction() as session:
        (key,) = session.scalars(select(ApiKey).where(ApiKey.tenant_id == GONE))
        values = {name: getattr(key, name) for name in _names(ApiKey)}
        session.add(ApiKey(**{**values, "id": "newer", "name": "newer"}))
        session.flush()
        key.successor_id = "newer"
    assert delete(filled, GONE, with_usage=False).receipt["rows"]["api_keys"] == 2


def test_a_name_is_free_again_once_the_deletion_has_finished(database: Database) -> None:
    with database.platform_transaction() as session:
        create_tenant(session, "acme", name="Acme Ltd")
        deletion = service.begin(session, "acme", with_usage=False)
    with database.platform_transaction() as session:
        with pytest.raises(TenantNotFound):
            get_tenant(session, "acme")
        assert repository.list_tenants(session) == []
        with pytest.raises(TenantExists, match="being deleted"):
            create_tenant(session, "acme")
        assert service.find_unfinished(session, "acme") is not None
    erase(database, deletion.id, with_usage=False)
    with database.platform_transaction() as session:
        assert create_tenant(session, "acme").id != deletion.id
        assert [tenant.slug for tenant in repository.list_tenants(session)] == ["acme"]
        assert service.find_unfinished(session, "acme") is None
        assert service.list_unfinished(session) == []
        assert [each.id for each in service.list_recent(session)] == [deletion.id]
        old = session.get_one(Tenant, deletion.id)
        assert (old.slug, old.name, old.is_suspended) == (f"~{old.id}", None, True)


def test_an_unknown_deletion_is_not_found(database: Database) -> None:
    with (
        database.platform_transaction(read_only=True) as session,
        pytest.raises(TenantDeletionNotFound),
    ):
        service.get(session, "0" * 36)
