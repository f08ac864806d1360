"""The audit log: written with the change, chained, and tampering is detected."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import text, update

from loraplex.platform.audit import repository
from loraplex.platform.audit.checkpoint import Checkpoint
from loraplex.platform.audit.event import BY_SYSTEM, Event, Origin
from loraplex.platform.audit.models import AuditEntry, AuditHead, PlatformAuditEntry
from loraplex.platform.audit.repository import AuditFilter
from loraplex.platform.audit.service import PLATFORM_CHAIN, AuditLog
from loraplex.platform.audit.verification import Breach, Verified, signed_text
from loraplex.platform.database import Database
from loraplex.platform.errors import InvalidValue
from loraplex.platform.keyring import Keyring
from loraplex.platform.keys.principal import Actor, ActorKind
from loraplex.platform.models import Base
from loraplex.platform.tenants.models import Tenant
from support.catalog import make_tenant
from support.databases import empty_all_tables
from support.scale import part_of
from support.synced import record_synced

SECRET, SUCCESSOR = b"s" * 32, b"t" * 32
BEGIN = datetime(2026, 3, 1, tzinfo=UTC)
ANNA = Origin(Actor(ActorKind.KEY, "annaskey0001", "Anna"), "req-1", "192.0.2.7")


def make_log(*secrets: bytes) -> AuditLog:
    return AuditLog(Keyring(secrets or (SECRET,), "audit"))


@pytest.fixture
def log() -> AuditLog:
    return make_log()


def write(
    database: Database, log: AuditLog, tenant: Tenant, num_entries: int, *, origin: Origin = ANNA
) -> None:
    for number in range(num_entries):
        with database.transaction(tenant.id) as session:
            event = Event("alias.set", f"bot@a{number}", {"version": number})
            log.record(session, origin, event)


def verify(database: Database, log: AuditLog, chain: str, **options: int) -> Verified:
    with database.platform_transaction(read_only=True) as session:
        return log.verify(session, chain, **options)


def test_a_chain_as_it_was_written_is_intact(
    database: Database, log: AuditLog, acme: Tenant, bolt: Tenant
) -> None:
    write(database, log, acme, 3)
    write(database, log, bolt, 1)
    with database.platform_transaction() as session:
        log.record_platform(session, BY_SYSTEM, Event("tenant.create", "acme"))
    assert verify(database, log, acme.id) == Verified(acme.id, 3, True)
    assert verify(database, log, bolt.id) == Verified(bolt.id, 1, True)
    assert verify(database, log, PLATFORM_CHAIN) == Verified(PLATFORM_CHAIN, 1, True)


def test_a_log_without_entries_is_intact(database: Database, log: AuditLog, acme: Tenant) -> None:
    assert verify(database, log, acme.id) == Verified(acme.id, 0, True)


def test_a_chain_is_verified_piece_by_piece(
    database: Database, log: AuditLog, acme: Tenant
) -> None:
    write(database, log, acme, 5)
    first = verify(database, log, acme.id, limit=2)
    assert first == Verified(acme.id, 2, False)
    second = verify(database, log, acme.id, after=2, limit=2)
    assert second == Verified(acme.id, 4, False)
    assert verify(database, log, acme.id, after=4, limit=2) == Verified(acme.id, 5, True)
    assert verify(database, log, acme.id, after=99) == Verified(acme.id, 5, True)


def test_a_change_that_fails_leaves_no_entry(
    database: Database, log: AuditLog, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        log.record(session, ANNA, Event("alias.set", "bot@prod"))
        session.rollback()
    assert verify(database, log, acme.id) == Verified(acme.id, 0, True)


def test_another_secret_verifies_nothing(database: Database, log: AuditLog, acme: Tenant) -> None:
    write(database, log, acme, 2)
    found = verify(database, make_log(SUCCESSOR), acme.id)
    assert found.breach == Breach(1, "The server has no secret of the entry's id.")


def test_a_changed_secret_keeps_what_was_written(
    database: Database, log: AuditLog, acme: Tenant
) -> None:
    write(database, log, acme, 2)
    write(database, make_log(SUCCESSOR, SECRET), acme, 2)
    assert verify(database, make_log(SUCCESSOR, SECRET), acme.id) == Verified(acme.id, 4, True)


def test_a_secret_that_was_given_up_writes_nothing_more(
    database: Database, log: AuditLog, acme: Tenant
) -> None:
    write(database, make_log(SUCCESSOR, SECRET), acme, 2)
    write(database, log, acme, 1)
    found = verify(database, make_log(SUCCESSOR, SECRET), acme.id)
    assert found.breach is not None
    assert found.breach.number == 3


ENTRIES = Base.metadata.tables["audit_entries"]
HEADS = Base.metadata.tables["audit_heads"]
NUM_ENTRIES = part_of(20_000, 100_000)
FORGERIES = {
    "tenant_id": "tenant_id = :other",
    "number": "number = number + 1000000",
    "at": "at = '2026-03-01 00:00:00.000001'",
    "actor_kind": "actor_kind = 'user'",
    "actor_id": "actor_id = 'annaskey0002'",
    "actor_name": "actor_name = 'anna'",
    "action": "action = 'alias.sat'",
    "resource": "resource = 'bot@A'",
    "details": """details = '{"version": -1}'""",
    "details, unreadable": "details = '{'",
    "request_id": "request_id = 'req-2'",
    "address": "address = '192.0.2.8'",
    "previous_hash": "previous_hash = zeroblob(32)",
    "hash": "hash = zeroblob(32)",
    "secret_id": "secret_id = 'ffffffff'",
}


@pytest.fixture(scope="module")
def long_chain(sqlite_database: Database) -> Iterator[tuple[Database, str, str]]:
    """A chain of 100,000 entries, made in bulk: the database, its tenant, and another one."""
    empty_all_tables(sqlite_database)
    tenant_id, other = (make_tenant(sqlite_database, slug).id for slug in ("long", "other"))
    keys = Keyring([SECRET], "audit")
    rows, previous = [], bytes(32)
    for number in range(1, NUM_ENTRIES + 1):
        entry = SimpleNamespace(
            tenant_id=tenant_id,
            number=number,
            at=BEGIN + timedelta(seconds=number),
            actor_kind=ActorKind.KEY,
            actor_id="annaskey0001",
            actor_name="Anna",
            action="alias.set",
            resource="bot@a",
            details={"version": number},
            request_id="req-1",
            address="192.0.2.7",
            previous_hash=previous,
            secret_id=keys.current_id,
        )
        entry.hash = previous = keys.sign(signed_text(tenant_id, entry))
        rows.append(vars(entry))
    with sqlite_database.platform_transaction() as session:
        session.connection().execute(ENTRIES.insert(), rows)
        session.add(AuditHead(tenant_id=tenant_id, number=NUM_ENTRIES, hash=previous))
    yield sqlite_database, tenant_id, other
    empty_all_tables(sqlite_database)


def test_of_many_entries_one_changed_byte_is_found_in_any_column(
    long_chain: tuple[Database, str, str],
) -> None:
    database, tenant_id, other = long_chain
    log = make_log()
    assert verify(database, log, tenant_id) == Verified(tenant_id, NUM_ENTRIES, True)
    with database.platform_transaction() as session:  # the end is cut off
        cut = session.get(AuditEntry, (tenant_id, NUM_ENTRIES))
        session.delete(cut)
    found = verify(database, log, tenant_id, after=NUM_ENTRIES - 10)
    assert found.breach == Breach(NUM_ENTRIES, "The end of the chain is cut off.")
    # Each forgery before the ones that were found already: the first one in the chain is told.
    step = (NUM_ENTRIES - 1000) // len(FORGERIES)
    numbers = range(NUM_ENTRIES - 1000, 0, -step)
    for (column, change), number in zip(FORGERIES.items(), numbers, strict=False):
        with database.platform_transaction() as session:
            statement = f"UPDATE audit_entries SET {change} WHERE tenant_id = :t AND number = :n"
            values = {"t": tenant_id, "n": number} | (
                {"other": other} if ":other" in change else {}
            )
            session.connection().execute(text(statement), values)
        found = verify(database, log, tenant_id, after=number - 100)
        assert found.breach is not None, column
        assert found.breach.number == number, column
        assert found.last_number == number - 1


def test_entries_that_are_missing_or_too_many_are_found(
    database: Database, log: AuditLog, acme: Tenant
) -> None:
    write(database, log, acme, 5)
    with database.platform_transaction() as session:
        session.connection().execute(
            update(HEADS).values(number=4)  # the head says less than there is
        )
    found = verify(database, log, acme.id)
    assert found.breach == Breach(5, "The entry is behind the end of the chain.")
    with database.platform_transaction() as session:
        session.delete(session.get_one(AuditHead, acme.id))
    assert verify(database, log, acme.id).breach == Breach(1, "The head is missing.")
    with database.platform_transaction() as session:
        session.delete(session.get_one(AuditEntry, (acme.id, 3)))
    assert verify(database, log, acme.id).breach == Breach(3, "The entry is missing.")


def test_a_chain_that_was_set_back_with_its_head_contradicts_the_checkpoint(
    database: Database, log: AuditLog, acme: Tenant, tmp_path: Path
) -> None:
    write(database, log, acme, 2)
    with database.platform_transaction() as session:
        head = session.get_one(AuditHead, acme.id)
        early = (head.number, head.hash)
    write(database, log, acme, 2)
    path = tmp_path / "ends.json"
    assert look(database, log, acme, path).breach is None
    write(database, log, acme, 1)
    assert look(database, log, acme, path).breach is None
    with database.platform_transaction() as session:
        for number in (3, 4, 5):
            session.delete(session.get_one(AuditEntry, (acme.id, number)))
        head = session.get_one(AuditHead, acme.id)
        head.number, head.hash = early
    assert verify(database, log, acme.id).breach is None  # by itself it looks whole
    found = look(database, log, acme, path)
    assert found.breach is not None
    assert found.breach.number == 5


def look(database: Database, log: AuditLog, tenant: Tenant, path: Path) -> Verified:
    checkpoint = Checkpoint(path)
    with database.platform_transaction(read_only=True) as session:
        verified = checkpoint.check(session, log.verify(session, tenant.id))
    checkpoint.save()
    return verified


def test_a_checkpoint_is_on_the_disk_before_it_replaces_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = record_synced(monkeypatch)
    Checkpoint(tmp_path / "ends.json").save()
    assert synced == [tmp_path / "ends.json.new", tmp_path]


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ends.json"
    path.write_text("[1]")
    with pytest.raises(InvalidValue):
        Checkpoint(path)


def test_concurrent_writers_keep_one_chain(database: Database, log: AuditLog, acme: Tenant) -> None:
    def write_both() -> None:
        write(database, log, acme, 5)
        with database.platform_transaction() as session:
            log.record_platform(session, BY_SYSTEM, Event("tenant.set", "acme"))

    threads = [threading.Thread(target=write_both) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verify(database, log, acme.id) == Verified(acme.id, 30, True)
    assert verify(database, log, PLATFORM_CHAIN) == Verified(PLATFORM_CHAIN, 6, True)


@pytest.fixture
def entries(database: Database, acme: Tenant, bolt: Tenant) -> Database:
    """Entries 1 to 4 of acme, one an hour, and one of bolt."""
    hours = iter(range(9))
    log = AuditLog(Keyring([SECRET], "audit"), clock=lambda: BEGIN + timedelta(hours=next(hours)))
    written = [
        (ANNA, Event("alias.set", "bot@prod")),
        (BY_SYSTEM, Event("alias.remove", "bot@prod")),
        (ANNA, Event("key.revoke", "k1")),
        (ANNA, Event("aliased.thing", "bot@prod")),
    ]
    for origin, event in written:
        with database.transaction(acme.id) as session:
            log.record(session, origin, event)
    with database.transaction(bolt.id) as session:
        log.record(session, ANNA, Event("alias.set", "bot@prod"))
    return database


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        (AuditFilter(), [4, 3, 2, 1]),
        (AuditFilter(action="alias.set"), [1]),
        (AuditFilter(action="alias"), [2, 1]),
        (AuditFilter(action="key%"), []),
        (AuditFilter(actor="Anna"), [4, 3, 1]),
        (AuditFilter(actor="annaskey0001"), [4, 3, 1]),
        (AuditFilter(actor="key:annaskey0001"), [4, 3, 1]),
        (AuditFilter(actor="user:annaskey0001"), []),
        (AuditFilter(actor="system"), [2]),
        (AuditFilter(resource="bot@prod"), [4, 2, 1]),
        (AuditFilter(since=BEGIN + timedelta(hours=1)), [4, 3, 2]),
        (AuditFilter(adapters={"bot"}), [2, 1]),
        (AuditFilter(adapters={"bo", "b"}), []),
        (AuditFilter(adapters=()), []),
        (AuditFilter(until=BEGIN + timedelta(hours=1)), [1]),
    ],
)
def test_lists_the_tenants_entries_that_are_wanted(
    entries: Database, acme: Tenant, wanted: AuditFilter, numbers: list[int]
) -> None:
    with entries.transaction(acme.id, read_only=True) as session:
        newest = repository.list_entries(session, wanted, after=None, limit=9)
        oldest = repository.list_entries(session, wanted, after=None, limit=9, oldest_first=True)
    assert [entry.number for entry in newest] == numbers
    assert [entry.number for entry in oldest] == numbers[::-1]


def test_pages_go_on_behind_the_last_entry(entries: Database, acme: Tenant) -> None:
    with entries.transaction(acme.id, read_only=True) as session:
        page = repository.list_entries(session, AuditFilter(), after=3, limit=1)
        back = repository.list_entries(session, AuditFilter(), after=3, limit=9, oldest_first=True)
    assert [entry.number for entry in page] == [2]
    assert [entry.number for entry in back] == [4]


def test_finds_the_requests_that_changed_something(entries: Database) -> None:
    log = make_log()
    with entries.platform_transaction() as session:
        origin = Origin(ANNA.actor, "req-platform")
        log.record_platform(session, origin, Event("tenant.create", "acme"))
        asked = {"req-1", "req-platform", "req-none"}
        assert repository.list_audited_requests(session, asked) == {"req-1", "req-platform"}
        assert session.get(PlatformAuditEntry, 1) is not None
