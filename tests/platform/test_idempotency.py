"""Stored responses: returned to the same request of the same caller only."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import text

from loraplex.platform.audit.event import BY_SYSTEM, Event
from loraplex.platform.audit.repository import list_audited_requests
from loraplex.platform.audit.service import AuditLog
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import (
    DatabaseBusy,
    IdempotencyConflict,
    IdempotencyInProgress,
    IdempotentAnswerLost,
)
from loraplex.platform.idempotency import service as module
from loraplex.platform.idempotency.models import IdempotentAnswer
from loraplex.platform.idempotency.service import (
    KEPT_FOR,
    IdempotentAnswers,
    KeyedRequest,
    hold,
    purge,
)
from loraplex.platform.keyring import Keyring
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant
from support.catalog import make_tenant
from support.databases import empty_all_tables, wait_until_one_is_blocked

SECRET, SUCCESSOR = b"s" * 32, b"t" * 32
FIRST = KeyedRequest(owner="key:one", key="k", request_hash=b"h" * 32, request_id="req-1")
AGAIN = replace(FIRST, request_id="req-2")


def make_answers(*secrets: bytes, server_id: str = "here") -> IdempotentAnswers:
    return IdempotentAnswers(secrets or (SECRET,), server_id)


def begin(
    database: Database, request: KeyedRequest, answers: IdempotentAnswers | None = None
) -> tuple[int, bytes] | None:
    with database.platform_transaction() as session:
        return (answers or make_answers()).begin(session, request)


def finish(database: Database, request: KeyedRequest, answer: bytes = b"made") -> None:
    with database.platform_transaction() as session:
        make_answers().finish(session, request, 201, answer)


def test_the_first_runs_and_the_others_get_its_answer(database: Database) -> None:
    answers = make_answers()
    with answers.running(FIRST):
        assert begin(database, FIRST, answers) is None
        with pytest.raises(IdempotencyInProgress):
            begin(database, AGAIN, answers)
    finish(database, FIRST)
    assert begin(database, AGAIN) == (201, b"made")


def test_another_request_with_the_same_key_is_a_conflict(database: Database) -> None:
    begin(database, FIRST)
    other = replace(AGAIN, request_hash=b"o" * 32)
    with pytest.raises(IdempotencyConflict):
        begin(database, other)
    assert begin(database, replace(other, owner="key:two")) is None


def test_what_came_to_nothing_may_be_sent_again(database: Database) -> None:
    begin(database, FIRST)
    with database.platform_transaction() as session:
        make_answers().give_up(session, FIRST)
        make_answers().give_up(session, replace(FIRST, key="never begun"))
    assert begin(database, AGAIN, make_answers(server_id="elsewhere")) is None


def change(database: Database, tenant: Tenant, request_id: str) -> None:
    """What a request does when it changes something."""
    log = AuditLog(Keyring([SECRET], "audit"))
    with database.transaction(tenant.id) as session:
        log.record(session, replace(BY_SYSTEM, request_id=request_id), Event("key.create", "k"))


@contextmanager
def changing(database: Database, tenant: Tenant, request: KeyedRequest) -> Iterator[TenantSession]:
    """The same, not committed before the block ends."""
    log = AuditLog(Keyring([SECRET], "audit"))
    guard = partial(hold, request=request)
    with database.transaction(tenant.id, guard=guard) as session:
        origin = replace(BY_SYSTEM, request_id=request.request_id)
        log.record(session, origin, Event("key.create", "k"))
        yield session


def test_a_change_is_refused_once_a_repetition_has_the_key(
    database: Database, acme: Tenant
) -> None:
    begin(database, FIRST)
    begin(database, AGAIN)
    with pytest.raises(IdempotencyInProgress), changing(database, acme, FIRST):
        pytest.fail("a repetition is executed")
    with changing(database, acme, AGAIN):
        pass
    with database.platform_transaction(read_only=True) as session:
        both = {FIRST.request_id, AGAIN.request_id}
        assert list_audited_requests(session, both) == {AGAIN.request_id}


def test_a_change_is_refused_once_nobody_has_the_key(database: Database, acme: Tenant) -> None:
    with pytest.raises(IdempotencyInProgress), changing(database, acme, FIRST):
        pytest.fail("it was given up")


def test_a_repetition_waits_for_the_commit_of_an_abandoned_request(
    database: Database, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_MS", 60_000)
    begin(database, FIRST)
    with ThreadPoolExecutor(1) as threads:
        with changing(database, acme, FIRST) as session:
            repetition = threads.submit(begin, database, AGAIN)
            wait_until_one_is_blocked(session)
        with pytest.raises(IdempotentAnswerLost):
            repetition.result()


def test_recovery_leaves_the_key_of_an_open_transaction(postgres_database: Database) -> None:
    empty_all_tables(postgres_database)
    begin(postgres_database, FIRST)
    acme = make_tenant(postgres_database, "acme")
    with (
        changing(postgres_database, acme, FIRST),
        postgres_database.platform_transaction() as session,
    ):
        session.execute(text("SET LOCAL lock_timeout = 1"))
        make_answers().recover(session)
    with pytest.raises(IdempotentAnswerLost):
        begin(postgres_database, AGAIN)


def test_a_repetition_waits_for_a_commit_that_hangs_only_so_long(
    postgres_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty_all_tables(postgres_database)
    monkeypatch.setattr(module, "LOCK_TIMEOUT_MS", 1)
    begin(postgres_database, FIRST)
    acme = make_tenant(postgres_database, "acme")
    with changing(postgres_database, acme, FIRST), pytest.raises(DatabaseBusy):
        begin(postgres_database, AGAIN)
    with pytest.raises(IdempotentAnswerLost):
        begin(postgres_database, AGAIN)


def test_what_failed_behind_its_change_is_not_done_again(database: Database, acme: Tenant) -> None:
    begin(database, FIRST)
    change(database, acme, FIRST.request_id)
    with database.platform_transaction() as session:
        make_answers().give_up(session, FIRST)
    with pytest.raises(IdempotentAnswerLost):
        begin(database, AGAIN)


def test_after_a_crash_only_what_changed_nothing_runs_again(
    database: Database, acme: Tenant
) -> None:
    changing, idle, foreign = (
        replace(FIRST, key=name, request_id=f"req-{name}") for name in ("changing", "idle", "far")
    )
    begin(database, changing)
    begin(database, idle)
    begin(database, foreign, make_answers(server_id="elsewhere"))
    change(database, acme, changing.request_id)
    with database.platform_transaction() as session:
        make_answers().recover(session)
    elsewhere = make_answers(server_id="elsewhere")
    with pytest.raises(IdempotentAnswerLost):
        begin(database, replace(changing, request_id="req-2"), elsewhere)
    assert begin(database, replace(idle, request_id="req-3"), elsewhere) is None
    with pytest.raises(IdempotencyInProgress):
        begin(database, replace(foreign, request_id="req-4"))


def test_an_answer_outlives_a_restart_of_the_server_that_gave_it(
    database: Database, acme: Tenant
) -> None:
    changing, idle = (replace(FIRST, key=name, request_id=name) for name in ("changing", "idle"))
    change(database, acme, changing.request_id)
    for request in (changing, idle):
        begin(database, request)
        finish(database, request)
    with database.platform_transaction() as session:
        make_answers().recover(session)
    for request in (changing, idle):
        assert begin(database, replace(request, request_id="again")) == (201, b"made")


def test_what_was_left_open_is_settled_when_it_is_sent_again(
    database: Database, acme: Tenant
) -> None:
    """Such as by a database that was away when the answer was to be kept."""
    answers = make_answers()
    changing = replace(FIRST, key="changing", request_id="req-changing")
    for request in (FIRST, changing):
        with answers.running(request):
            begin(database, request, answers)
    change(database, acme, changing.request_id)
    for _ in range(2):
        with pytest.raises(IdempotentAnswerLost):
            begin(database, replace(changing, request_id="req-3"), answers)
    with answers.running(AGAIN):
        assert begin(database, AGAIN, answers) is None
        finish(database, FIRST, b"late")  # the first one's, that hung for so long
        with pytest.raises(IdempotencyInProgress):
            begin(database, replace(FIRST, request_id="req-4"), answers)
        finish(database, AGAIN, b"mine")
    assert begin(database, replace(FIRST, request_id="req-5"), answers) == (201, b"mine")


def test_an_answer_is_kept_for_a_day(database: Database) -> None:
    begin(database, FIRST)
    finish(database, FIRST)
    with database.platform_transaction() as session:
        row = session.get_one(IdempotentAnswer, (FIRST.owner, FIRST.key))
        assert utc_now() - row.created_at < timedelta(minutes=1)
        day_later = row.created_at + timedelta(hours=24)
        assert purge(session, now=day_later) == 0
        assert purge(session, now=day_later + timedelta(microseconds=1)) == 1
        assert session.get(IdempotentAnswer, (FIRST.owner, FIRST.key)) is None


def test_an_old_answer_is_not_given_before_it_is_purged(database: Database) -> None:
    begin(database, FIRST)
    finish(database, FIRST)
    with database.platform_transaction() as session:
        row = session.get_one(IdempotentAnswer, (FIRST.owner, FIRST.key))
        row.created_at -= KEPT_FOR + timedelta(seconds=1)
    assert begin(database, replace(AGAIN, request_hash=b"o" * 32)) is None
    finish(database, AGAIN, b"another")
    with pytest.raises(IdempotencyConflict):
        begin(database, replace(FIRST, request_id="req-3"))


@pytest.mark.parametrize("place", [{"key": "other"}, {"owner": "key:two"}])
def test_an_answer_is_stored_encrypted_and_opens_in_its_place_only(
    database: Database, place: dict[str, Any]
) -> None:
    other = replace(FIRST, request_id="req-other", **place)
    for request in (FIRST, other):
        begin(database, request)
        finish(database, request, b"lpx_live_secret")
    with database.platform_transaction() as session:
        row = session.get_one(IdempotentAnswer, (FIRST.owner, FIRST.key))
        others = session.get_one(IdempotentAnswer, (other.owner, other.key))
        assert row.answer is not None
        assert others.answer is not None
        assert b"secret" not in row.answer
        assert row.answer[:20] != others.answer[:20], "equal answers must not look alike"
        others.answer = row.answer
    with pytest.raises(IdempotentAnswerLost):
        begin(database, replace(other, request_id="req-2"))


def test_an_answer_outlives_a_change_of_the_secret(database: Database) -> None:
    begin(database, FIRST)
    finish(database, FIRST)
    assert begin(database, AGAIN, make_answers(SUCCESSOR, SECRET)) == (201, b"made")
    with pytest.raises(IdempotentAnswerLost):
        begin(database, AGAIN, make_answers(SUCCESSOR))
