"""Adds users, changes their roles and disables them.

A caller can only assign a role, or change a user, whose permissions it holds itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.exc import IntegrityError

from ..base import utc_now
from ..errors import (
    GrantTooWide,
    InvalidValue,
    LastAdministrator,
    OwnAccount,
    UserExists,
    UserNotFound,
)
from ..keys.principal import PRIVATE_SCOPES, ActorKind, Grant, Principal, TenantRole
from ..quotas import service as quotas
from ..quotas.service import Resource
from ..sessions import TenantSession
from . import repository
from .models import MAX_EMAIL_LENGTH, User


def add_user(session: TenantSession, email: str, role: TenantRole, *, by: Principal) -> User:
    """Add a user. Raises InvalidValue, UserExists, GrantTooWide or QuotaExceeded."""
    _check_covered(by, role)
    quotas.check_room(session, Resource.USERS)
    user = User(email=check_email(email), role=role, created_at=utc_now())
    try:
        with session.begin_nested():
            session.add(user)
    except IntegrityError as exc:
        raise UserExists(f"The tenant has a user {user.email!r} already.") from exc
    return user


def list_users(
    session: TenantSession,
    *,
    after: str | None = None,
    limit: int | None = None,
    email: str | None = None,
    role: TenantRole | None = None,
    is_disabled: bool | None = None,
) -> Sequence[User]:
    """The tenant's users by address: at most `limit` after the address `after`."""
    return repository.list_users(
        session,
        after=after,
        limit=limit,
        email=None if email is None else email.lower(),
        role=role,
        is_disabled=is_disabled,
    )


def get_user(session: TenantSession, user_id: str) -> User:
    """The tenant's user of this id. Raises UserNotFound."""
    return _found(repository.find(session, user_id), user_id)


def get_user_to_change(session: TenantSession, user_id: str) -> User:
    """The same; it and the active owners are locked until this unit of work ends."""
    return _found(repository.find_and_lock(session, user_id), user_id)


def hold_user(session: TenantSession, user_id: str) -> User:
    """The same, locked against changes until this unit of work ends.

    Users are locked before keys, and keys before limits, so that units of work never deadlock.
    """
    return _found(repository.find_and_hold(session, user_id), user_id)


def hold_active_user(session: TenantSession, user_id: str) -> User:
    """The same, unless it is disabled. Raises UserNotFound."""
    user = hold_user(session, user_id)
    if user.disabled_at is not None:
        raise UserNotFound(f"The user {user_id!r} is disabled.")
    return user


def get_user_to_invite(session: TenantSession, user_id: str, *, by: Principal) -> User:
    """The user, if the caller holds all of the user's permissions without network restrictions:
    the holder of the invitation acts as the user.

    Raises UserNotFound or GrantTooWide.
    """
    user = get_user_to_change(session, user_id)
    _check_covered(by, user.role)
    if by.networks is not None:
        message = "Network-restricted keys cannot send invitations."
        raise GrantTooWide(message, param="networks")
    return user


def change_role(session: TenantSession, user_id: str, role: TenantRole, *, by: Principal) -> User:
    """Raises UserNotFound, OwnAccount, GrantTooWide or LastAdministrator."""
    user = get_user_to_change(session, user_id)
    if user.role is role:
        return user
    _check_may_change(session, user, by)
    _check_covered(by, role)
    user.role = role
    return user


def disable_user(session: TenantSession, user_id: str, *, by: Principal) -> User:
    """Disable the user; its keys must be revoked in the same unit of work.

    Idempotent. Raises UserNotFound, OwnAccount, GrantTooWide or LastAdministrator.
    """
    user = get_user_to_change(session, user_id)
    if user.disabled_at is None:
        _check_may_change(session, user, by)
        user.disabled_at = utc_now()
    return user


def enable_user(session: TenantSession, user_id: str, *, by: Principal) -> User:
    """Enable a disabled user, who needs new keys. Idempotent.

    Raises UserNotFound, GrantTooWide or QuotaExceeded.
    """
    user = get_user_to_change(session, user_id)
    if user.disabled_at is not None:
        _check_covered(by, user.role)
        quotas.check_room(session, Resource.USERS)
        user.disabled_at = None
    return user


def check_email(text: str) -> str:
    """The address in lower case. Raises InvalidValue.

    No more than that it can be one: only a letter to it would prove more.
    """
    local, at, domain = text.lower().rpartition("@")
    is_address = at and local and "." in domain.strip(".") and not domain.startswith(".")
    is_plain = text.isascii() and text.isprintable() and " " not in text and "@" not in local
    if not (is_address and is_plain and len(text) <= MAX_EMAIL_LENGTH):
        raise InvalidValue("Not an email address such as ada@example.com.", param="email")
    return text.lower()


def _found(user: User | None, user_id: str) -> User:
    if user is None:
        raise UserNotFound(f"No user has the id {user_id!r}.")
    return user


def _check_may_change(session: TenantSession, user: User, by: Principal) -> None:
    if by.actor.kind is ActorKind.USER and by.actor.id == user.id:
        raise OwnAccount
    _check_covered(by, user.role)
    if repository.list_active_owner_ids(session) == [user.id]:
        raise LastAdministrator


def _check_covered(by: Principal, role: TenantRole) -> None:
    # The networks and expiry of the caller's key are not part of a role.
    own = by.grant
    # An operator has to be able to add a tenant's first owner, and the audit log tells who did.
    scopes = role.scopes if by.operator_role is None else role.scopes - PRIVATE_SCOPES
    wanted = Grant(scopes, networks=own.networks, expires_at=own.expires_at)
    if own.excess(wanted) is not None:
        raise GrantTooWide(
            f"A user who is {role} has permissions that your key does not have.", param="role"
        )
