"""Creates, changes, disables and authenticates operators and their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy.exc import IntegrityError

from ..audit.event import Party
from ..base import utc_now
from ..errors import (
    ApiKeyRevoked,
    GrantTooWide,
    InvalidApiKey,
    InvalidTransition,
    KeyNotFound,
    LastAdministrator,
    OperatorExists,
    OperatorNotFound,
    OwnAccount,
)
from ..keyring import Keyring
from ..keys.principal import Actor, Grant, OperatorPrincipal, OperatorRole
from ..keys.stored_key import (
    check_key_name,
    check_networks,
    is_text_of,
    is_use_to_be_noted,
    note_use,
    sign,
)
from ..keys.token import OPERATOR_PREFIX, make_token, parse_token
from ..names import check_operator_name
from ..sessions import PlatformSession
from . import repository
from .models import Operator, OperatorKey

DEFAULT_LIFETIME = timedelta(days=90)


@dataclass(frozen=True, slots=True)
class IssuedOperatorKey:
    """A new key with its text, which can be read here and never again."""

    key: OperatorKey
    text: str = field(repr=False)


class AuthenticatedOperator(NamedTuple):
    """Which operator calls, and whether the use of the key is to be noted."""

    principal: OperatorPrincipal
    is_use_to_be_noted: bool


class OperatorService:
    """Operators and their keys, under the peppers of all API keys."""

    def __init__(self, peppers: Keyring, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._peppers = peppers
        self._clock = clock

    # --- operators --------------------------------------------------------------------------------

    def create(self, session: PlatformSession, name: str, role: OperatorRole) -> Operator:
        """Add an operator. Raises InvalidValue or OperatorExists."""
        operator = Operator(name=check_operator_name(name), role=role, created_at=self._clock())
        try:
            with session.begin_nested():
                session.add(operator)
        except IntegrityError as exc:
            raise OperatorExists(f"An operator with the name {name!r} already exists.") from exc
        return operator

    def list_operators(
        self, session: PlatformSession, *, after: str | None = None, limit: int | None = None
    ) -> Sequence[Operator]:
        """Operators by name: at most `limit` after the name `after`."""
        return repository.list_operators(session, after=after, limit=limit)

    def get(self, session: PlatformSession, name: str) -> Operator:
        """The operator of this name. Raises OperatorNotFound."""
        return _found(repository.find_by_name(session, name), name)

    def get_to_change(self, session: PlatformSession, name: str) -> Operator:
        """The same; it and the active administrators are locked until this unit of work ends."""
        return _found(repository.find_and_lock(session, name), name)

    def change_role(
        self, session: PlatformSession, name: str, role: OperatorRole, *, by: Actor
    ) -> Operator:
        """Raises OperatorNotFound, OwnAccount or LastAdministrator."""
        operator = self.get_to_change(session, name)
        if operator.role is not role:
            _check_may_change(session, operator, by)
            operator.role = role
        return operator

    def disable(self, session: PlatformSession, name: str, *, by: Actor) -> Operator:
        """Disable the operator and revoke its keys permanently. Idempotent. Raises as
        `change_role`."""
        operator = self.get_to_change(session, name)
        if operator.disabled_at is None:
            _check_may_change(session, operator, by)
            operator.disabled_at = self._clock()
            for key in repository.list_keys(session, operator.id):
                key.revoked_at = key.revoked_at or operator.disabled_at
        return operator

    def enable(self, session: PlatformSession, name: str) -> Operator:
        """Enable a disabled operator, who needs a new key. Idempotent."""
        operator = self.get_to_change(session, name)
        operator.disabled_at = None
        return operator

    # --- their keys -------------------------------------------------------------------------------

    def issue_key(
        self,
        session: PlatformSession,
        operator: Operator,
        *,
        name: str,
        lifetime: timedelta | None = DEFAULT_LIFETIME,
        networks: Iterable[str] | None = None,
        issuer: OperatorPrincipal | None = None,
    ) -> IssuedOperatorKey:
        """Make a key for the operator; without a lifetime it does not expire.

        It may outlive its issuer's: so operators renew theirs. Raises InvalidValue, GrantTooWide
        for networks beyond the issuer's, or InvalidTransition for a disabled operator.
        """
        allowed = check_networks(networks)
        own = Grant(frozenset(), networks=None if issuer is None else issuer.networks)
        if own.excess(Grant(frozenset(), networks=allowed)) is not None:
            raise GrantTooWide("The networks must be among those of your key.", param="networks")
        if operator.disabled_at is not None:
            raise InvalidTransition("disabled", "given a key")
        token = make_token(OPERATOR_PREFIX)
        now = self._clock()
        key = OperatorKey(
            id=token.key_id,
            operator_id=operator.id,
            name=check_key_name(name),
            created_at=now,
            expires_at=None if lifetime is None else now + lifetime,
            networks=None if allowed is None else [str(network) for network in allowed],
        )
        sign(key, token, self._peppers)
        session.add(key)
        session.flush()
        return IssuedOperatorKey(key, token.text)

    def list_keys(self, session: PlatformSession, name: str) -> Sequence[OperatorKey]:
        """The operator's keys, the oldest first. Raises OperatorNotFound."""
        return repository.list_keys(session, self.get(session, name).id)

    def revoke_key(self, session: PlatformSession, name: str, key_id: str) -> OperatorKey:
        """Refuse this key from now on. Idempotent. Raises OperatorNotFound or KeyNotFound."""
        found = repository.find_key(session, key_id)
        if found is None or found[1].id != self.get(session, name).id:
            raise KeyNotFound(f"The operator {name!r} has no key with the id {key_id!r}.")
        key = found[0]
        key.revoked_at = key.revoked_at or self._clock()
        return key

    def authenticate(self, session: PlatformSession, text: str) -> AuthenticatedOperator:
        """Which operator calls with this key. Raises InvalidApiKey."""
        token = parse_token(text)
        found = repository.find_key(session, token.key_id)
        is_right = is_text_of(found[0] if found else None, token, self._peppers)
        if found is None or not is_right:
            raise InvalidApiKey
        key, operator = found
        principal = OperatorPrincipal(
            operator.id,
            operator.name,
            operator.role,
            key.expires_at,
            networks=key.allowed_networks,
        )
        now = self._clock()
        try:
            key.check_usable(now)
            if operator.disabled_at is not None:
                raise ApiKeyRevoked
        except InvalidApiKey as refusal:
            refusal.refused = Party(None, principal.actor)
            raise
        return AuthenticatedOperator(principal, is_use_to_be_noted(key, self._peppers, now))

    def note_use(self, session: PlatformSession, text: str) -> None:
        """Write down that the key was used, and sign it under the present pepper."""
        token = parse_token(text)
        found = repository.find_key(session, token.key_id)
        if found is not None and is_text_of(found[0], token, self._peppers):
            note_use(found[0], token, self._peppers, self._clock())


def _found(operator: Operator | None, name: str) -> Operator:
    if operator is None:
        raise OperatorNotFound(f"No operator has the name {name!r}.")
    return operator


def _check_may_change(session: PlatformSession, operator: Operator, by: Actor) -> None:
    if by.id == operator.id:
        raise OwnAccount
    if repository.list_active_admin_ids(session) == [operator.id]:
        raise LastAdministrator
