"""Invitations, enrolment, sign-in and sign-out.

An account's sessions expire after a fixed time, earlier when they are idle, and immediately when
their operator or user is disabled. The caller hashes passwords, outside of any transaction (see
`Passwords`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from ..audit.event import UNKNOWN, Party
from ..base import utc_now
from ..errors import (
    InvalidTransition,
    InvitationEnded,
    SessionEnded,
    SignInFailed,
    TenantSuspended,
)
from ..keys.principal import Actor, ActorKind, AnyPrincipal, OperatorPrincipal, Principal, SignedIn
from ..locked_rows import lock_or_add
from ..operators.models import Operator
from ..sessions import PlatformSession, TenantSession, UnitOfWork
from ..users.models import User
from . import repository
from .models import Account, AccountKind, AccountSession
from .repository import Holder
from .tokens import (
    INVITATION_PREFIX,
    SESSION_PREFIX,
    AccountToken,
    make_token,
    parse_token,
)

INVITATION_LIFETIME = timedelta(hours=24)
SESSION_LIFETIME = timedelta(hours=12)
IDLE_LIFETIME = timedelta(minutes=30)
CONFIRMATION_LIFETIME = timedelta(minutes=10)
NO_TIME = timedelta(0)
SEEN_GRANULARITY = timedelta(seconds=30)
"""A use is recorded only if the last one is older, so a busy page costs few writes."""


@dataclass(frozen=True, slots=True)
class IssuedInvitation:
    """A new invitation with its token, which can be read here and never again."""

    expires_at: datetime
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """A new session with its cookie's content."""

    token: AccountToken
    principal: AnyPrincipal


class AuthenticatedSession(NamedTuple):
    """The signed-in account, and whether the use of the session must be recorded."""

    principal: AnyPrincipal
    is_use_to_be_noted: bool


class AccountService:
    """Accounts, invitations and sessions."""

    def __init__(self, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._clock = clock

    # --- invitations ------------------------------------------------------------------------------

    def invite_operator(self, session: PlatformSession, operator: Operator) -> IssuedInvitation:
        """Invite the operator to set a password; earlier invitations become invalid.

        Raises InvalidTransition for a disabled operator.
        """
        return self._invite(session, AccountKind.OPERATOR, operator)

    def invite_user(self, session: TenantSession, user: User) -> IssuedInvitation:
        """The same for a user of the session's tenant."""
        return self._invite(session, AccountKind.USER, user)

    def find_invited(self, session: PlatformSession, token: str) -> Holder:
        """The owner of this invitation. Raises InvitationEnded or TenantSuspended."""
        parsed = parse_token(token, INVITATION_PREFIX)
        holder = parsed and repository.find_invited(session, parsed.hash)
        if not holder or not holder.is_active or not self._is_invited(holder.account):
            raise InvitationEnded
        _check_tenant(holder)
        return holder

    def enrol(self, session: UnitOfWork, token: str, password_hash: str) -> Account:
        """Set the password of the invitation's account; its sessions end. Raises InvitationEnded.

        Of several concurrent uses of one invitation, one succeeds.
        """
        parsed = parse_token(token, INVITATION_PREFIX)
        account = parsed and repository.lock_account(
            session, Account.invitation_hash == parsed.hash
        )
        if not account or not self._is_invited(account):
            raise InvitationEnded
        self._set_password(session, account, password_hash)
        return account

    # --- sessions ---------------------------------------------------------------------------------

    def find_account(
        self, session: PlatformSession, name: str, tenant_slug: str | None
    ) -> Holder | None:
        """The account with the name used at sign-in; None if it cannot sign in."""
        if tenant_slug is None:
            holder = repository.find_operators_account(session, name)
        else:
            holder = repository.find_users_account(session, name.lower(), tenant_slug)
        return holder if holder is not None and holder.is_active else None

    def get(self, session: PlatformSession, account_id: str) -> Holder:
        """The account of a signed-in caller. Raises SessionEnded."""
        holder = repository.find_by_id(session, account_id)
        if holder is None or not holder.is_active:
            raise SessionEnded
        return holder

    def open(self, session: UnitOfWork, holder: Holder) -> OpenedSession:
        """Sign in after the password was verified.

        Raises SignInFailed if the password was changed meanwhile, TenantSuspended.
        """
        _check_tenant(holder)
        account = repository.lock_account(session, Account.id == holder.account.id)
        if account is None or account.password_hash != holder.account.password_hash:
            raise SignInFailed
        return self._open(session, holder)

    def open_enrolled(self, session: UnitOfWork, holder: Holder) -> OpenedSession:
        """Sign in after a password was set by invitation."""
        return self._open(session, holder)

    def open_proved(
        self, session: UnitOfWork, holder: Holder, issuer: str, authenticated_at: datetime | None
    ) -> OpenedSession:
        """Sign in a person whom this identity provider has authenticated, and when if it says so:
        it is a confirmation too, as long as it is recent. Raises TenantSuspended."""
        _check_tenant(holder)
        confirmed_until = authenticated_at and authenticated_at + CONFIRMATION_LIFETIME
        return self._open(session, holder, issuer, confirmed_until)

    def authenticate(
        self, session: PlatformSession, text: str, idle: timedelta = NO_TIME
    ) -> AuthenticatedSession:
        """The account that is signed in with this token. Raises SessionEnded or TenantSuspended.

        `idle`: the time since the user was last active.
        """
        token = parse_token(text, SESSION_PREFIX)
        found = token and repository.find_session(session, token.hash)
        if not found or not found[1].is_active or not self._is_alive(found[0]):
            raise SessionEnded
        _check_tenant(found[1])
        is_old = self._clock() - idle - found[0].seen_at >= SEEN_GRANULARITY
        return AuthenticatedSession(_principal(*found), is_old)

    def note_use(self, session: PlatformSession, text: str, idle: timedelta = NO_TIME) -> None:
        """Write down when the person did something last."""
        token = parse_token(text, SESSION_PREFIX)
        row = token and repository.lock_session(session, token.hash)
        if row and self._is_alive(row):
            row.seen_at = max(row.seen_at, self._clock() - idle)

    def confirm(self, session: UnitOfWork, text: str) -> datetime:
        """The password was confirmed; returns until when that is valid. Raises SessionEnded."""
        token = parse_token(text, SESSION_PREFIX)
        row = token and repository.lock_session(session, token.hash)
        if not row or not self._is_alive(row):
            raise SessionEnded
        row.confirmed_until = self._clock() + CONFIRMATION_LIFETIME
        return row.confirmed_until

    def change_password(
        self, session: UnitOfWork, account_id: str, password_hash: str, *, keep: str
    ) -> None:
        """Set a new password. All sessions except that of this token end, and invitations become
        invalid.

        They may be the reason for the change. Raises SessionEnded.
        """
        account = repository.lock_account(session, Account.id == account_id)
        if account is None:
            raise SessionEnded
        self._set_password(session, account, password_hash, keep=AccountToken(keep).hash)

    def end(self, session: UnitOfWork, text: str) -> None:
        """Sign out here."""
        token = parse_token(text, SESSION_PREFIX)
        row = token and repository.lock_session(session, token.hash)
        if row:
            session.delete(row)

    def end_all(self, session: UnitOfWork, account_id: str, *, keep: str | None = None) -> int:
        """Sign out everywhere, but where the session has the hash `keep`; how many there were."""
        ended = [row for row in repository.list_sessions(session, account_id) if row.id != keep]
        for row in ended:
            session.delete(row)
        return len(ended)

    def close(self, session: UnitOfWork, account_id: str) -> None:
        """Delete password, invitation and sessions of a disabled account."""
        account = repository.lock_account(session, Account.id == account_id)
        if account is not None:  # it can no longer be used to sign in
            self.end_all(session, account_id)
            session.flush()
            session.delete(account)

    def purge(self, session: PlatformSession) -> int:
        """Forget the sessions that have ended; how many."""
        now = self._clock()
        return repository.purge_sessions(session, now, now - IDLE_LIFETIME)

    # ----------------------------------------------------------------------------------------------

    def _invite(
        self, session: UnitOfWork, kind: AccountKind, person: Operator | User
    ) -> IssuedInvitation:
        if person.disabled_at is not None:
            raise InvalidTransition("disabled", "invited")
        account = lock_or_add(session, Account(id=person.id, kind=kind))
        token = make_token(INVITATION_PREFIX)
        account.invitation_hash = token.hash
        account.invitation_expires_at = expires_at = self._clock() + INVITATION_LIFETIME
        session.flush()
        return IssuedInvitation(expires_at, token.text)

    def _set_password(
        self, session: UnitOfWork, account: Account, password_hash: str, *, keep: str | None = None
    ) -> None:
        account.password_hash, account.password_set_at = password_hash, self._clock()
        account.invitation_hash = account.invitation_expires_at = None
        self.end_all(session, account.id, keep=keep)
        session.flush()

    def _open(
        self,
        session: UnitOfWork,
        holder: Holder,
        issuer: str | None = None,
        confirmed_until: datetime | None = None,
    ) -> OpenedSession:
        token, now = make_token(SESSION_PREFIX), self._clock()
        row = AccountSession(
            id=token.hash,
            account_id=holder.account.id,
            created_at=now,
            seen_at=now,
            expires_at=now + SESSION_LIFETIME,
            confirmed_until=confirmed_until,
            issuer=issuer,
        )
        session.add(row)
        session.flush()
        return OpenedSession(token, _principal(row, holder))

    def _is_invited(self, account: Account) -> bool:
        expires_at = account.invitation_expires_at
        return expires_at is not None and self._clock() < expires_at

    def _is_alive(self, row: AccountSession) -> bool:
        now = self._clock()
        return now < row.expires_at and now < row.seen_at + IDLE_LIFETIME


def actor_of(holder: Holder) -> Actor:
    """The account's owner as the audit log names it."""
    if holder.operator is not None:
        return Actor(ActorKind.OPERATOR, holder.operator.id, holder.operator.name)
    assert holder.user is not None, "an account is an operator's or a user's"
    return Actor(ActorKind.USER, holder.user.id, holder.user.email)


def party_of(holder: Holder | None) -> Party:
    """The party in the audit log when a sign-in with this account, or with an unknown name, is
    refused."""
    if holder is None:
        return UNKNOWN
    return Party(None if holder.tenant is None else holder.tenant.id, actor_of(holder))


def _principal(row: AccountSession, holder: Holder) -> AnyPrincipal:
    person = holder.operator or holder.user
    assert person is not None, "an account is an operator's or a user's"
    signed_in = SignedIn(
        holder.account.id, person.role, row.expires_at, row.confirmed_until, row.issuer
    )
    if holder.operator is not None:
        operator = holder.operator
        return OperatorPrincipal(
            operator.id, operator.name, operator.role, row.expires_at, signed_in
        )
    assert holder.user is not None
    assert holder.tenant is not None
    return Principal(
        tenant_id=holder.tenant.id,
        tenant_slug=holder.tenant.slug,
        actor=actor_of(holder),
        scopes=holder.user.role.scopes,
        key_id=None,
        expires_at=row.expires_at,
        tenant_weight=holder.tenant.weight,
        tenant_slo=holder.tenant.slo,
        signed_in=signed_in,
    )


def _check_tenant(holder: Holder) -> None:
    if holder.tenant is not None and holder.tenant.is_suspended:
        refusal = TenantSuspended()
        refusal.refused = party_of(holder)
        raise refusal
