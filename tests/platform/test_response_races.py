"""Stored responses that are continued, purged and read at the same time, and rows that a tenant
may have so many of."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier

import pytest

from loraplex.platform.base import utc_now
from loraplex.platform.batches import files
from loraplex.platform.batches.file_models import FilePurpose, StoredFile
from loraplex.platform.database import Database
from loraplex.platform.errors import QuotaExceeded
from loraplex.platform.responses import service
from loraplex.platform.responses.models import StoredResponse
from loraplex.platform.tenants.models import Tenant
from support.catalog import make_tenant
from support.databases import empty_all_tables, wait_until_one_is_blocked
from support.stored_responses import KEY_ID, conversation, principal_of, store

NUM_THREADS = 6


def days_left(database: Database, tenant: Tenant, response_id: str) -> int:
    with database.transaction(tenant.id, read_only=True) as session:
        found = service.get_response(session, response_id, viewer=principal_of(tenant))
        return round((found.expires_at - utc_now()) / timedelta(days=1))


@pytest.mark.parametrize(("first", "second"), [(9, 5), (5, 9)])
def test_two_that_continue_one_response_at_once_are_both_stored_and_keep_it_for_the_longer_one(
    database: Database, acme: Tenant, first: int, second: int
) -> None:
    with database.transaction(acme.id) as session:
        store(session, "root", days=1)

    def continue_too() -> None:
        with database.transaction(acme.id) as session:
            store(session, "second", after="root", earlier=("root",), days=second)

    with ThreadPoolExecutor(1) as threads:
        with database.transaction(acme.id) as session:
            store(session, "first", after="root", earlier=("root",), days=first)
            waiting = threads.submit(continue_too)
            wait_until_one_is_blocked(session)
        waiting.result(timeout=60)
    assert days_left(database, acme, "root") == 9
    with database.transaction(acme.id, read_only=True) as session:
        for name in ("first", "second"):
            assert conversation(session, principal_of(acme), name) == ["root", name]


def test_many_that_continue_one_conversation_do_not_wait_for_each_other_in_a_circle(
    database: Database, acme: Tenant
) -> None:
    names = [f"r{number}" for number in range(4)]
    with database.transaction(acme.id) as session:
        for number, name in enumerate(names):
            store(session, name, after=names[number - 1] if number else None)
    barrier = Barrier(NUM_THREADS)

    def run(number: int) -> None:
        barrier.wait()
        earlier = tuple(names if number % 2 else reversed(names))
        with database.transaction(acme.id) as session:
            store(session, f"end{number}", after="r3", earlier=earlier, days=2 + number)

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(run, range(NUM_THREADS)))
    assert {days_left(database, acme, name) for name in names} == {1 + NUM_THREADS}


def test_an_expired_response_that_is_continued_meanwhile_is_not_purged(
    database: Database, acme: Tenant
) -> None:
    """It was read before it expired, and the answer took until after."""
    with database.transaction(acme.id) as session:
        store(session, "root", days=-0.01)
        store(session, "other", days=-0.01)

    def purge() -> int:
        with database.platform_transaction() as platform:
            return service.purge(platform, utc_now())

    with ThreadPoolExecutor(1) as threads:
        with database.transaction(acme.id) as session:
            store(session, "next", after="root", earlier=("root",), days=5)
            purging = threads.submit(purge)
            wait_until_one_is_blocked(session)
        assert purging.result(timeout=60) == 1, "the other one"
    with database.transaction(acme.id, read_only=True) as session:
        assert conversation(session, principal_of(acme), "next") == ["root", "next"]


def test_a_reader_sees_a_whole_conversation_while_it_expires(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        store(session, "root", days=0.5)
        store(session, "next", after="root", days=5)
    with database.transaction(acme.id, read_only=True) as session:
        service.get_response(session, "next", viewer=principal_of(acme))
        with database.platform_transaction() as platform:
            assert service.purge(platform, utc_now() + timedelta(days=1)) == 1
        assert conversation(session, principal_of(acme), "next") == ["root", "next"]
    with database.transaction(acme.id, read_only=True) as session:
        assert session.get(StoredResponse, "root") is None


def test_uploads_at_once_do_not_exceed_the_number_of_files(
    database: Database, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take the tenant's lock one after another."""
    monkeypatch.setattr(files, "MAX_FILES", 2)
    with database.transaction(acme.id) as session:
        files.add_upload(session, a_file("file-0"))

    def upload(number: int) -> bool:
        try:
            with database.transaction(acme.id) as session:
                files.add_upload(session, a_file(f"file-{number}"))
        except QuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        added = list(threads.map(upload, range(1, NUM_THREADS + 1)))
    assert sum(added) == 1


def test_the_lock_of_a_tenant_holds_up_its_own_uploads_only(
    postgres_database: Database,
) -> None:
    """SQLite's writers wait for each other, whatever they write."""
    database = postgres_database
    empty_all_tables(database)
    acme, bolt = make_tenant(database, "acme"), make_tenant(database, "bolt")

    def upload(tenant: Tenant) -> None:
        with database.transaction(tenant.id) as session:
            files.add_upload(session, a_file(f"file-{tenant.slug}"))

    with ThreadPoolExecutor(2) as threads:
        with database.transaction(acme.id) as session:
            files.add_upload(session, a_file("file-first"))
            waiting = threads.submit(upload, acme)
            wait_until_one_is_blocked(session)
            threads.submit(upload, bolt).result(timeout=60)
            assert not waiting.done()
        waiting.result(timeout=60)


def a_file(file_id: str) -> StoredFile:
    now = utc_now()
    return StoredFile(
        id=file_id,
        key_id=KEY_ID,
        purpose=FilePurpose.BATCH,
        filename="in.jsonl",
        size_bytes=1,
        sha256="0" * 64,
        created_at=now,
        expires_at=now + timedelta(days=1),
    )
