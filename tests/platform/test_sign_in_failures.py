"""Counting failed sign-ins, and locking the name or the address."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from loraplex.platform.accounts import failures
from loraplex.platform.accounts.failures import Subjects
from loraplex.platform.database import Database

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
EMAIL = "ada@acme.example"
ADDRESS = ip_address("192.0.2.7")
SUBJECTS = Subjects(b"secret" * 8)


def fail(database: Database, subjects: list[str], now: datetime) -> None:
    with database.platform_transaction() as session:
        failures.note_failure(session, subjects, now)


def is_locked(database: Database, subjects: list[str], now: datetime) -> bool:
    with database.platform_transaction(read_only=True) as session:
        return failures.locked_until(session, subjects, now) is not None


def test_five_failures_within_a_quarter_hour_lock_for_a_quarter_hour(database: Database) -> None:
    of_root = SUBJECTS.of("root", None, None)
    for minute in range(4):
        fail(database, of_root, NOON + timedelta(minutes=minute))
    assert not is_locked(database, of_root, NOON + timedelta(minutes=4))
    fifth = NOON + timedelta(minutes=14, seconds=59)
    fail(database, of_root, fifth)
    assert is_locked(database, of_root, fifth + timedelta(minutes=14, seconds=59))
    assert not is_locked(database, of_root, fifth + timedelta(minutes=15))
    fail(database, of_root, fifth + timedelta(minutes=15))
    assert not is_locked(database, of_root, fifth + timedelta(minutes=15))


def test_a_failure_a_quarter_hour_after_the_first_begins_anew(database: Database) -> None:
    of_root = SUBJECTS.of("root", None, None)
    for _ in range(4):
        fail(database, of_root, NOON)
    fail(database, of_root, NOON + timedelta(minutes=15))
    assert not is_locked(database, of_root, NOON + timedelta(minutes=15))


def test_failures_that_are_long_ago_do_not_count(database: Database) -> None:
    of_root = SUBJECTS.of("root", None, None)
    for minute in range(0, 60, 4):
        fail(database, of_root, NOON + timedelta(minutes=minute))
        assert not is_locked(database, of_root, NOON + timedelta(minutes=minute))


def test_names_and_addresses_are_locked_each_by_itself(database: Database) -> None:
    for number in range(5):
        fail(database, SUBJECTS.of(f"guess-{number}", "acme", ADDRESS), NOON)
    assert is_locked(database, SUBJECTS.of("root", None, ADDRESS), NOON)
    assert not is_locked(database, SUBJECTS.of("guess-1", "acme", ip_address("192.0.2.8")), NOON)


def test_a_name_is_locked_in_its_tenant_alone_and_in_any_case() -> None:
    def account(name: str, tenant: str | None) -> str:
        return SUBJECTS.of(name, tenant, None)[0]

    assert account(EMAIL, "acme") == account(EMAIL.upper(), "acme")
    assert len({account(EMAIL, tenant) for tenant in ("acme", "bolt", None)}) == 3


def test_of_two_locks_the_longer_is_told(database: Database) -> None:
    account, address = SUBJECTS.of("root", None, ADDRESS)
    later = NOON + timedelta(minutes=10)
    for subject, moment in ((account, NOON), (address, later)):
        for _ in range(failures.MAX_FAILURES):
            fail(database, [subject], moment)
    with database.platform_transaction(read_only=True) as session:
        until = failures.locked_until(session, [account, address], later)
    assert until == later + failures.WINDOW


def test_whoever_is_signed_in_is_not_locked_by_guesses_from_outside(database: Database) -> None:
    subjects = Subjects(b"secret")
    with database.platform_transaction() as session:
        for _ in range(failures.MAX_FAILURES):
            failures.note_failure(session, subjects.of("account", None, None), NOON)
        assert failures.locked_until(session, subjects.of("account", None, None), NOON)
        assert failures.locked_until(session, subjects.of_session("account"), NOON) is None


def test_addresses_of_one_ipv6_network_are_one_caller() -> None:
    def of(address: str) -> list[str]:
        return SUBJECTS.of("root", None, ip_address(address))

    assert of("2001:db8::1") == of("2001:db8::ffff:1")
    assert of("2001:db8::1") != of("2001:db8:0:1::1")


def test_whoever_knows_the_password_begins_anew(database: Database) -> None:
    of_root = SUBJECTS.of("root", None, ADDRESS)
    for _ in range(4):
        fail(database, of_root, NOON)
    for _ in range(2):
        with database.platform_transaction() as session:
            failures.forget(session, of_root[0])
    fail(database, of_root[:1], NOON)
    assert not is_locked(database, of_root, NOON)


def test_what_counts_no_more_is_forgotten(database: Database) -> None:
    fail(database, SUBJECTS.of("root", None, ADDRESS), NOON)
    with database.platform_transaction() as session:
        assert failures.purge(session, NOON + timedelta(minutes=30)) == 0
        assert failures.purge(session, NOON + timedelta(minutes=31)) == 2
