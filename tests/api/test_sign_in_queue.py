"""The queue for password hashing, and the cost of an attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from threading import Event

import pytest
from sqlalchemy import Engine, event, select

from loraplex.api.contract.errors import ApiError
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.control_plane.sign_in import (
    MAX_WAITING,
    NUM_HASHING,
    SignIn,
    own_tenant_id,
)
from loraplex.platform.accounts.failures import MAX_FAILURES, Subjects, note_failure
from loraplex.platform.accounts.passwords import Passwords
from loraplex.platform.accounts.service import OpenedSession
from loraplex.platform.audit.event import BY_SYSTEM, UNKNOWN, Origin, Party
from loraplex.platform.audit.models import PlatformAuditEntry
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import SessionEnded, SignInFailed, SignInLocked
from loraplex.platform.keys.principal import (
    SYSTEM,
    AnyPrincipal,
    OperatorPrincipal,
    OperatorRole,
    SignedIn,
)

SECRET = b"secret"
GUESSER = ip_address("192.0.2.7")
OPERATOR = OperatorPrincipal("id", "root", OperatorRole.ADMIN)


class SlowPasswords(Passwords):
    """Compares when it is told to."""

    def __init__(self) -> None:
        super().__init__(memory_kib=8, num_passes=1)
        self.may_go_on = Event()

    def is_password(self, password: str, stored: str | None) -> bool:
        self.may_go_on.wait()
        return super().is_password(password, stored)


@pytest.fixture
def control_plane(tmp_path: Path) -> Iterator[ControlPlane]:
    database = Database(f"sqlite:///{tmp_path / 'test.db'}")
    database.upgrade()
    with database.platform_transaction() as session:
        for _ in range(MAX_FAILURES):
            note_failure(session, Subjects(SECRET).of("x", None, GUESSER), utc_now())
    plane = ControlPlane(database, SECRET)
    yield plane
    plane.close()


def test_what_is_unknown_costs_what_a_wrong_password_does(control_plane: ControlPlane) -> None:
    """The same statements and one hash: neither the time nor the database tells them apart."""
    passwords = CountingPasswords()
    with control_plane._database.platform_transaction() as session:
        operator = control_plane.operators.create(session, "known", OperatorRole.ADMIN)
        token = control_plane.accounts.invite_operator(session, operator).token
        control_plane.accounts.enrol(session, token, passwords.hash("the right one"))

    async def cost(name: str, address: str) -> tuple[list[str], int]:
        sign_in = SignIn(control_plane, SECRET, passwords)
        passwords.num_compared = 0
        with all_statements() as statements, pytest.raises(SignInFailed):
            await sign_in.open(name, None, "guess", address=ip_address(address), request_id="req")
        await sign_in.aclose()
        return statements, passwords.num_compared

    known = asyncio.run(cost("known", "198.51.100.1"))
    assert asyncio.run(cost("unknown", "198.51.100.2")) == known
    lookups = [text for text in known[0] if "FROM accounts" in text]
    assert (len(lookups), known[1]) == (1, 1)


@contextmanager
def all_statements() -> Iterator[list[str]]:
    """What any database is asked meanwhile."""
    texts: list[str] = []

    def record(connection: object, cursor: object, text: str, *rest: object) -> None:
        texts.append(text)

    event.listen(Engine, "before_cursor_execute", record)
    try:
        yield texts
    finally:
        event.remove(Engine, "before_cursor_execute", record)


class CountingPasswords(Passwords):
    def __init__(self) -> None:
        super().__init__(memory_kib=8, num_passes=1)
        self.num_compared = 0

    def is_password(self, password: str, stored: str | None) -> bool:
        self.num_compared += 1
        return super().is_password(password, stored)


def test_whoever_knows_the_password_confirms_and_changes_it(control_plane: ControlPlane) -> None:
    here = ip_address("198.51.100.1")
    origin = Origin(SYSTEM, "req")

    async def scenario() -> None:
        sign_in = SignIn(control_plane, SECRET, CountingPasswords())

        async def enter(password: str) -> OpenedSession:
            return await sign_in.open("known", None, password, address=here, request_id="req")

        enrolled = await sign_in.enrol(token, "the first", address=here, request_id="req")
        other = await enter("the first")
        caller, own = enrolled.principal, enrolled.token.text
        await sign_in.confirm(caller, own, "the first", origin)
        assert signed_in(own).is_confirmed(utc_now())
        assert not signed_in(other.token.text).is_confirmed(utc_now())
        await sign_in.change_password(caller, own, "the first", "the second", origin)
        assert signed_in(own).account_id == operator.id
        with pytest.raises(SessionEnded):
            signed_in(other.token.text)
        with pytest.raises(SignInFailed) as caught:
            await enter("the first")
        assert caught.value.refused == Party(None, caller.actor)
        with pytest.raises(SignInFailed) as caught:
            await sign_in.open("nobody", None, "guess", address=here, request_id="req")
        assert caught.value.refused == UNKNOWN
        assert (await enter("the second")).principal.actor == caller.actor
        await sign_in.aclose()

    def signed_in(text: str) -> SignedIn:
        with control_plane._database.platform_transaction(read_only=True) as session:
            found = control_plane.accounts.authenticate(session, text).principal.signed_in
        assert found is not None
        return found

    with control_plane._database.platform_transaction() as session:
        operator = control_plane.operators.create(session, "known", OperatorRole.ADMIN)
        token = control_plane.accounts.invite_operator(session, operator).token
    asyncio.run(scenario())
    with control_plane._database.platform_transaction(read_only=True) as session:
        entries = session.scalars(select(PlatformAuditEntry).order_by(PlatformAuditEntry.number))
        told = [(entry.action, entry.resource, entry.details, entry.address) for entry in entries]
    assert told == [
        ("account.enrol", operator.id, {}, "198.51.100.1"),
        ("session.create", operator.id, {}, "198.51.100.1"),
        ("session.confirm", operator.id, {}, None),
        ("account.change", operator.id, {"password": True}, None),
        ("session.create", operator.id, {}, "198.51.100.1"),
    ]


def test_whoever_signs_in_may_fail_as_often_again(control_plane: ControlPlane) -> None:
    passwords = CountingPasswords()
    with control_plane._database.platform_transaction() as session:
        operator = control_plane.operators.create(session, "known", OperatorRole.ADMIN)
        token = control_plane.accounts.invite_operator(session, operator).token
        control_plane.accounts.enrol(session, token, passwords.hash("the right one"))

    async def scenario() -> None:
        sign_in = SignIn(control_plane, SECRET, passwords)
        for _ in range(2):
            for _ in range(MAX_FAILURES - 1):
                with pytest.raises(SignInFailed):
                    await sign_in.open("known", None, "guess", address=None, request_id="req")
            await sign_in.open("known", None, "the right one", address=None, request_id="req")
        await sign_in.aclose()

    asyncio.run(scenario())
    with control_plane._database.platform_transaction(read_only=True) as session:
        assert session.scalars(select(PlatformAuditEntry.address)).all() == [None, None]


@pytest.mark.parametrize(
    ("caller", "tenant_id"),
    [
        (OPERATOR, None),
        (OPERATOR.within("acme-id", "acme", 1.0), None),
        (replace(OPERATOR.within("acme-id", "acme", 1.0), operator_role=None), "acme-id"),
    ],
)
def test_what_an_operator_does_to_its_account_is_in_the_platforms_log(
    caller: AnyPrincipal, tenant_id: str | None
) -> None:
    assert own_tenant_id(caller) == tenant_id


def test_whoever_has_a_session_guesses_its_password_five_times(control_plane: ControlPlane) -> None:
    sign_in = SignIn(control_plane, SECRET, CountingPasswords())
    with control_plane._database.platform_transaction() as session:
        operator = control_plane.operators.create(session, "known", OperatorRole.ADMIN)
        control_plane.accounts.invite_operator(session, operator)
    signed_in = SignedIn(operator.id, operator.role, utc_now(), None)
    caller = OperatorPrincipal(operator.id, "known", operator.role, None, signed_in)

    async def guess() -> None:
        for number in range(MAX_FAILURES + 2):
            if number % 2:
                attempt = sign_in.confirm(caller, "token", "guess", BY_SYSTEM)
            else:
                attempt = sign_in.change_password(caller, "token", "guess", "new", BY_SYSTEM)
            with pytest.raises(SignInLocked if number >= MAX_FAILURES else SignInFailed):
                await attempt
        await sign_in.aclose()

    asyncio.run(guess())


def test_a_name_that_is_locked_while_others_wait_is_locked_for_them(
    control_plane: ControlPlane,
) -> None:
    async def guess_at_once() -> list[type[BaseException]]:
        sign_in = SignIn(control_plane, SECRET, CountingPasswords())
        attempts = [
            sign_in.open("known", None, f"guess {number}", address=None, request_id="req")
            for number in range(12)
        ]
        ends = await asyncio.gather(*attempts, return_exceptions=True)
        await sign_in.aclose()
        return [type(end) for end in ends if isinstance(end, BaseException)]

    ends = asyncio.run(guess_at_once())
    assert set(ends) == {SignInFailed, SignInLocked}
    assert len(ends) == 12
    # One more may be under way at the fifth.
    assert MAX_FAILURES <= ends.count(SignInFailed) < MAX_FAILURES + NUM_HASHING


def test_whoever_goes_away_while_waiting_takes_no_place(control_plane: ControlPlane) -> None:
    async def go_away() -> int:
        sign_in = SignIn(control_plane, SECRET, CountingPasswords())
        async with AsyncExitStack() as places:
            for _ in range(NUM_HASHING):
                await places.enter_async_context(sign_in._place())
            waiting = asyncio.create_task(sign_in._place().__aenter__())
            await asyncio.sleep(0)
            assert sign_in._num_waiting == 1
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await sign_in.aclose()
        return sign_in._num_waiting

    assert asyncio.run(go_away()) == 0


def test_whoever_is_locked_is_told_so_even_where_everybody_waits(
    control_plane: ControlPlane,
) -> None:
    """So a locked address neither waits for a place nor takes one from the others."""
    refused, locked, others = asyncio.run(_crowd(control_plane))
    assert isinstance(refused, ApiError)
    assert refused.code == "overloaded"
    assert isinstance(locked, SignInLocked)
    assert {type(error) for error in others} == {SignInFailed}


async def _crowd(control_plane: ControlPlane) -> tuple[Exception, Exception, list[Exception]]:
    """How one too many is refused, how one that is locked, and how those before them are."""
    passwords = SlowPasswords()
    sign_in = SignIn(control_plane, SECRET, passwords)

    async def attempt(name: str, address: str) -> Exception:
        with pytest.raises((SignInFailed, SignInLocked, ApiError)) as caught:
            await sign_in.open(name, None, "guess", address=ip_address(address), request_id="req")
        return caught.value

    others = [
        asyncio.create_task(attempt(f"other-{number}", f"198.51.100.{number}"))
        for number in range(NUM_HASHING + MAX_WAITING)
    ]
    try:
        while sign_in._num_waiting < MAX_WAITING:
            await asyncio.sleep(0.01)
        refused = await attempt("one-too-many", "203.0.113.1")
        locked = await attempt("anybody", str(GUESSER))
    finally:
        passwords.may_go_on.set()
    ends = await asyncio.gather(*others)
    await sign_in.aclose()
    return refused, locked, ends
