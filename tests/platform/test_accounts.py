"""Accounts in the control plane: invitations, sessions and their ends, failed sign-ins."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select, update

from loraplex.platform.accounts import repository
from loraplex.platform.accounts.models import Account, AccountSession
from loraplex.platform.accounts.passwords import Passwords
from loraplex.platform.accounts.repository import Holder
from loraplex.platform.accounts.service import AccountService, party_of
from loraplex.platform.accounts.tokens import SESSION_PREFIX, parse_token
from loraplex.platform.audit.event import UNKNOWN, Party
from loraplex.platform.database import Database
from loraplex.platform.errors import (
    InvalidTransition,
    InvitationEnded,
    SessionEnded,
    SignInFailed,
    TenantSuspended,
)
from loraplex.platform.keys.principal import (
    Actor,
    ActorKind,
    OperatorPrincipal,
    OperatorRole,
    Principal,
    TenantRole,
)
from loraplex.platform.operators.service import OperatorService
from loraplex.platform.tenants import service as tenants
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.users import service as users
from support.databases import wait_until_one_is_blocked
from support.identity import SettableClock, caller_of, peppers

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
EMAIL = "ada@acme.example"


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock(NOON)


@pytest.fixture
def accounts(clock: SettableClock) -> AccountService:
    return AccountService(clock=clock)


def invite_operator(database: Database, accounts: AccountService, name: str = "root") -> str:
    """The token of a new operator's invitation."""
    operators = OperatorService(peppers("secret"))
    with database.platform_transaction() as session:
        operator = operators.create(session, name, OperatorRole.ADMIN)
        return accounts.invite_operator(session, operator).token


def invite_user(
    database: Database, accounts: AccountService, tenant: Tenant, email: str = EMAIL
) -> str:
    """The token of a new user's invitation."""
    with database.transaction(tenant.id) as session:
        user = users.add_user(session, email, TenantRole.DEVELOPER, by=caller_of(tenant))
        return accounts.invite_user(session, user).token


def enrol(database: Database, accounts: AccountService, token: str, stored: str = "hash") -> Holder:
    with database.platform_transaction() as session:
        accounts.enrol(session, token, stored)
    with database.platform_transaction(read_only=True) as session:
        holder = accounts.find_account(session, "root", None)
        holder = holder or accounts.find_account(session, EMAIL, "acme")
    assert holder is not None
    return holder


def sign_in(database: Database, accounts: AccountService, holder: Holder) -> str:
    with database.platform_transaction() as session:
        return accounts.open(session, holder).token.text


def who(database: Database, accounts: AccountService, token: str) -> OperatorPrincipal | Principal:
    with database.platform_transaction(read_only=True) as session:
        return accounts.authenticate(session, token).principal


def test_whoever_takes_an_invitation_is_let_in_as_who_it_is_for(
    database: Database, accounts: AccountService, acme: Tenant
) -> None:
    operators = enrol(database, accounts, invite_operator(database, accounts))
    operator = who(database, accounts, sign_in(database, accounts, operators))
    assert isinstance(operator, OperatorPrincipal)
    assert (operator.name, operator.role) == ("root", OperatorRole.ADMIN)
    assert operator.expires_at == NOON + timedelta(hours=12)
    token = invite_user(database, accounts, acme)
    with database.platform_transaction() as session:
        tenants.get_tenant(session, "acme").weight = 2.5
        accounts.enrol(session, token, "hash")
        holder = accounts.find_account(session, EMAIL.upper(), "acme")
        assert holder is not None
        user = accounts.open(session, holder).principal
    assert isinstance(user, Principal)
    assert (user.tenant_id, user.actor.name, user.key_id) == (acme.id, EMAIL, None)
    assert user.scopes == TenantRole.DEVELOPER.scopes
    assert user.expires_at == NOON + timedelta(hours=12)
    assert user.tenant_weight == 2.5
    assert user.signed_in is not None
    assert (user.signed_in.account_id, user.signed_in.role) == (user.actor.id, "developer")


def test_users_of_one_tenant_sign_in_each_by_themselves(
    database: Database, accounts: AccountService, acme: Tenant
) -> None:
    tokens = [invite_user(database, accounts, acme, email) for email in (EMAIL, "eve@acme.example")]
    with database.platform_transaction() as session:
        for token in tokens:
            accounts.enrol(session, token, "hash")
        eve = accounts.find_account(session, "eve@acme.example", "acme")
        assert eve is not None
        assert accounts.open(session, eve).principal.actor.name == "eve@acme.example"


def test_an_invitation_is_good_once_and_for_a_day(
    database: Database, accounts: AccountService, clock: SettableClock
) -> None:
    token = invite_operator(database, accounts)
    clock.now = NOON + timedelta(hours=24)
    with pytest.raises(InvitationEnded), database.platform_transaction() as session:
        accounts.find_invited(session, token)
    with pytest.raises(InvitationEnded), database.platform_transaction() as session:
        accounts.enrol(session, token, "hash")
    clock.now = NOON + timedelta(hours=23, minutes=59)
    enrol(database, accounts, token)
    with pytest.raises(InvitationEnded), database.platform_transaction() as session:
        accounts.enrol(session, token, "another")


def test_of_many_who_use_one_invitation_at_once_one_sets_the_password(
    database: Database, accounts: AccountService
) -> None:
    token = invite_operator(database, accounts)

    def attempt(number: int) -> bool:
        try:
            with database.platform_transaction() as session:
                accounts.enrol(session, token, f"hash {number}")
        except InvitationEnded:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(attempt, range(8))) == 1


def test_a_new_invitation_ends_the_one_before(database: Database, accounts: AccountService) -> None:
    first = invite_operator(database, accounts)
    with database.platform_transaction() as session:
        operator = OperatorService(peppers("secret")).get(session, "root")
        second = accounts.invite_operator(session, operator).token
    with pytest.raises(InvitationEnded), database.platform_transaction() as session:
        accounts.enrol(session, first, "hash")
    enrol(database, accounts, second)


def test_an_invitation_ends_with_its_account(database: Database, accounts: AccountService) -> None:
    token = invite_operator(database, accounts)
    with database.platform_transaction() as session:
        holder = accounts.find_invited(session, token)
        accounts.close(session, holder.account.id)
    with pytest.raises(InvitationEnded), database.platform_transaction() as session:
        accounts.find_invited(session, token)


def test_another_password_ends_the_invitation_that_is_open(
    database: Database, accounts: AccountService
) -> None:
    holder = enrol(database, accounts, invite_operator(database, accounts))
    session_token = sign_in(database, accounts, holder)
    with database.platform_transaction() as session:
        assert holder.operator is not None
        invitation = accounts.invite_operator(session, holder.operator).token
        accounts.change_password(session, holder.account.id, "another", keep=session_token)
    with pytest.raises(InvitationEnded), database.platform_transaction() as session:
        accounts.enrol(session, invitation, "theirs")


def test_a_session_ends_when_it_is_not_used_and_at_the_latest_after_twelve_hours(
    database: Database, accounts: AccountService, clock: SettableClock
) -> None:
    holder = enrol(database, accounts, invite_operator(database, accounts))
    idle, used = sign_in(database, accounts, holder), sign_in(database, accounts, holder)
    for minutes in range(20, 12 * 60, 20):
        clock.now = NOON + timedelta(minutes=minutes)
        who(database, accounts, used)
        with database.platform_transaction() as session:
            accounts.note_use(session, used)
    with pytest.raises(SessionEnded):
        who(database, accounts, idle)
    clock.now = NOON + timedelta(hours=12, microseconds=-1)
    who(database, accounts, used)
    clock.now = NOON + timedelta(hours=12)
    with pytest.raises(SessionEnded):
        who(database, accounts, used)
    clock.now = NOON + timedelta(minutes=30)
    with pytest.raises(SessionEnded):
        who(database, accounts, idle)
    clock.now = NOON + timedelta(minutes=30, microseconds=-1)
    who(database, accounts, idle)


def test_a_session_that_has_ended_does_not_begin_again(
    database: Database, accounts: AccountService, clock: SettableClock
) -> None:
    """Such as by a use that is noted late."""
    holder = enrol(database, accounts, invite_operator(database, accounts))
    token = sign_in(database, accounts, holder)
    clock.now = NOON + timedelta(minutes=30)
    with database.platform_transaction() as session:
        accounts.note_use(session, token)
        with pytest.raises(SessionEnded):
            accounts.confirm(session, token)
    with pytest.raises(SessionEnded):
        who(database, accounts, token)


def test_only_sessions_that_have_ended_are_forgotten(
    database: Database, accounts: AccountService, clock: SettableClock
) -> None:
    holder = enrol(database, accounts, invite_operator(database, accounts))
    sign_in(database, accounts, holder)
    clock.now = NOON + timedelta(minutes=1)
    used = sign_in(database, accounts, holder)
    clock.now = NOON + timedelta(minutes=30)
    with database.platform_transaction() as session:
        assert accounts.purge(session) == 1
    who(database, accounts, used)
    with database.platform_transaction() as session:
        session.scalars(select(AccountSession)).one().seen_at += timedelta(days=1)
    clock.now = NOON + timedelta(hours=12, minutes=1)
    with database.platform_transaction() as session:
        assert accounts.purge(session) == 1


def test_a_use_is_to_be_noted_half_a_minute_after_the_last(
    database: Database, accounts: AccountService, clock: SettableClock
) -> None:
    token = sign_in(
        database, accounts, enrol(database, accounts, invite_operator(database, accounts))
    )
    for microseconds, is_due in ((-1, False), (0, True)):
        clock.now = NOON + timedelta(seconds=30, microseconds=microseconds)
        with database.platform_transaction(read_only=True) as session:
            assert accounts.authenticate(session, token).is_use_to_be_noted is is_due


def test_a_page_that_asks_by_itself_keeps_no_session_alive(
    database: Database, accounts: AccountService, clock: SettableClock
) -> None:
    """The person did something last five minutes after noon, whatever pages say afterwards."""
    holder = enrol(database, accounts, invite_operator(database, accounts))
    token = sign_in(database, accounts, holder)
    clock.now = NOON + timedelta(minutes=20)
    with database.platform_transaction() as session:
        idle = timedelta(minutes=20)
        assert not accounts.authenticate(session, token, idle).is_use_to_be_noted
        for minutes in (15, 19):
            accounts.note_use(session, token, timedelta(minutes=minutes))
    clock.now = NOON + timedelta(minutes=35, microseconds=-1)
    who(database, accounts, token)
    clock.now = NOON + timedelta(minutes=35)
    with pytest.raises(SessionEnded):
        who(database, accounts, token)


def test_a_confirmation_counts_for_ten_minutes(
    database: Database, accounts: AccountService, clock: SettableClock
) -> None:
    token = sign_in(
        database, accounts, enrol(database, accounts, invite_operator(database, accounts))
    )
    before = who(database, accounts, token).signed_in
    assert before is not None
    assert not before.is_confirmed(NOON)
    with database.platform_transaction() as session:
        accounts.confirm(session, token)
    after = who(database, accounts, token).signed_in
    assert after is not None
    assert after.is_confirmed(NOON + timedelta(minutes=9, seconds=59))
    assert not after.is_confirmed(NOON + timedelta(minutes=10))


def end_here(
    accounts: AccountService, database: Database, tokens: list[str], holder: Holder
) -> None:
    with database.platform_transaction() as session:
        accounts.end(session, tokens[0])


def end_everywhere(
    accounts: AccountService, database: Database, tokens: list[str], holder: Holder
) -> None:
    with database.platform_transaction() as session:
        accounts.end_all(session, holder.account.id)


def change_password(
    accounts: AccountService, database: Database, tokens: list[str], holder: Holder
) -> None:
    with database.platform_transaction() as session:
        accounts.change_password(session, holder.account.id, "new", keep=tokens[0])


def invite_again(
    accounts: AccountService, database: Database, tokens: list[str], holder: Holder
) -> None:
    with database.platform_transaction() as session:
        operator = OperatorService(peppers("secret")).get(session, "root")
        accounts.enrol(session, accounts.invite_operator(session, operator).token, "new")


def close(accounts: AccountService, database: Database, tokens: list[str], holder: Holder) -> None:
    with database.platform_transaction() as session:
        accounts.close(session, holder.account.id)


@pytest.mark.parametrize(
    ("act", "remaining"),
    [
        (end_here, [False, True]),
        (end_everywhere, [False, False]),
        (change_password, [True, False]),
        (invite_again, [False, False]),
        (close, [False, False]),
    ],
)
def test_what_ends_which_sessions(
    act: Callable[[AccountService, Database, list[str], Holder], None],
    remaining: list[bool],
    database: Database,
    accounts: AccountService,
) -> None:
    holder = enrol(database, accounts, invite_operator(database, accounts))
    tokens = [sign_in(database, accounts, holder) for _ in range(2)]
    act(accounts, database, tokens, holder)

    def is_signed_in(token: str) -> bool:
        try:
            who(database, accounts, token)
        except SessionEnded:
            return False
        return True

    assert [is_signed_in(token) for token in tokens] == remaining


def test_what_is_ended_or_closed_may_be_so_again(
    database: Database, accounts: AccountService
) -> None:
    holder = enrol(database, accounts, invite_operator(database, accounts))
    token = sign_in(database, accounts, holder)
    for _ in range(2):
        end_here(accounts, database, [token], holder)
    for _ in range(2):
        close(accounts, database, [], holder)
    with pytest.raises(SessionEnded):
        change_password(accounts, database, [token], holder)


def test_an_account_and_a_session_are_changed_as_the_database_has_them_now(
    database: Database, accounts: AccountService
) -> None:
    holder = enrol(database, accounts, invite_operator(database, accounts))
    token = parse_token(sign_in(database, accounts, holder), SESSION_PREFIX)
    assert token is not None
    later = NOON + timedelta(hours=1)
    with database.platform_transaction() as session:
        found = repository.find_session(session, token.hash)
        assert found is not None
        for change in (
            update(Account).values(password_hash="changed"),
            update(AccountSession).values(seen_at=later),
        ):
            session.execute(change, execution_options={"synchronize_session": False})
        account = repository.lock_account(session, Account.id == holder.account.id)
        row = repository.lock_session(session, token.hash)
        assert account is not None
        assert row is not None
        assert (account.password_hash, row.seen_at) == ("changed", later)


def test_whoever_signs_in_while_they_are_being_disabled_is_signed_out_again(
    database: Database, accounts: AccountService
) -> None:
    holder = enrol(database, accounts, invite_operator(database, accounts))
    with ThreadPoolExecutor(1) as threads:
        with database.platform_transaction() as session:
            token = accounts.open(session, holder).token.text
            session.flush()
            closing = threads.submit(close, accounts, database, [], holder)
            wait_until_one_is_blocked(session)
        closing.result()
    with pytest.raises(SessionEnded):
        who(database, accounts, token)


def test_a_password_that_was_changed_meanwhile_lets_nobody_in(
    database: Database, accounts: AccountService
) -> None:
    holder = enrol(database, accounts, invite_operator(database, accounts))
    invite_again(accounts, database, [], holder)
    with pytest.raises(SignInFailed), database.platform_transaction() as session:
        accounts.open(session, holder)


def test_a_disabled_operator_is_not_let_in_and_not_invited(
    database: Database, accounts: AccountService
) -> None:
    holder = enrol(database, accounts, invite_operator(database, accounts))
    token = sign_in(database, accounts, holder)
    with database.platform_transaction() as session:
        operator = OperatorService(peppers("secret")).get(session, "root")
        operator.disabled_at = NOON
        with pytest.raises(InvalidTransition):
            accounts.invite_operator(session, operator)
    with pytest.raises(SessionEnded):
        who(database, accounts, token)
    with database.platform_transaction(read_only=True) as session:
        assert accounts.find_account(session, "root", None) is None
        for account_id in (holder.account.id, "nobody"):
            with pytest.raises(SessionEnded):
                accounts.get(session, account_id)


def test_the_account_of_whoever_is_signed_in_is_theirs(
    database: Database, accounts: AccountService
) -> None:
    holder = enrol(database, accounts, invite_operator(database, accounts))
    with database.platform_transaction(read_only=True) as session:
        found = accounts.get(session, holder.account.id)
        assert found.operator is not None
        assert found.operator.name == "root"
        assert party_of(found) == Party(None, Actor(ActorKind.OPERATOR, found.operator.id, "root"))
    assert party_of(None) == UNKNOWN


def test_a_suspended_tenants_user_is_refused(
    database: Database, accounts: AccountService, acme: Tenant
) -> None:
    holder = enrol(database, accounts, invite_user(database, accounts, acme))
    token = sign_in(database, accounts, holder)
    with database.transaction(acme.id) as session:
        assert holder.user is not None
        invitation = accounts.invite_user(session, holder.user).token
    with database.platform_transaction() as session:
        tenants.set_suspended(tenants.get_tenant(session, "acme"), True)
    with pytest.raises(TenantSuspended) as caught:
        who(database, accounts, token)
    ada = Actor(ActorKind.USER, holder.user.id, EMAIL)
    assert caught.value.refused == Party(acme.id, ada)
    with database.platform_transaction(read_only=True) as session:
        suspended = accounts.find_account(session, EMAIL, "acme")
        assert suspended is not None
        with pytest.raises(TenantSuspended):
            accounts.open(session, suspended)
        with pytest.raises(TenantSuspended):
            accounts.find_invited(session, invitation)


def test_a_user_of_another_tenant_has_another_account(
    database: Database, accounts: AccountService, acme: Tenant, bolt: Tenant
) -> None:
    enrol(database, accounts, invite_user(database, accounts, acme))
    with database.platform_transaction(read_only=True) as session:
        assert accounts.find_account(session, EMAIL, "bolt") is None
        assert accounts.find_account(session, EMAIL, None) is None


@pytest.mark.parametrize(
    "text", ["", "lpx_session_", "lpx_session_" + "x" * 44, "lpx_join_" + "x" * 43]
)
def test_what_has_not_the_form_of_a_session_is_not_looked_for(text: str) -> None:
    assert parse_token(text, SESSION_PREFIX) is None


# --- passwords ------------------------------------------------------------------------------------


def test_a_password_is_known_by_its_hash_alone() -> None:
    passwords = Passwords(memory_kib=64, num_passes=1)
    stored = passwords.hash("correct horse battery")
    assert stored.startswith("$argon2id$v=19$m=64,t=1,p=1$")
    assert "horse" not in stored
    assert stored != passwords.hash("correct horse battery")
    assert passwords.is_password("correct horse battery", stored)
    assert not passwords.is_password("correct horse batterz", stored)
    assert not passwords.is_password("nobody's password", None)
    assert not passwords.is_password("x", "no hash")
