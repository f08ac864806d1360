"""Making operators, and checking their keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from ..base import utc_now
from ..errors import ApiKeyExpired, ApiKeyRevoked, InvalidApiKey
from ..keys.principal import OperatorPrincipal, OperatorRole
from ..keys.token import OPERATOR_PREFIX, make_token, parse_token
from ..sessions import PlatformSession
from . import repository
from .models import Operator, OperatorKey

DEFAULT_LIFETIME = timedelta(days=90)
_UNKNOWN_MAC = bytes(hashlib.sha256().digest_size)


@dataclass(frozen=True, slots=True)
class IssuedOperatorKey:
    """A new key with its text, which can be read here and never again."""

    key: OperatorKey
    text: str = field(repr=False)


class OperatorService:
    """Operators and their keys, under the pepper of all API keys."""

    def __init__(self, pepper: bytes, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._pepper = pepper
        self._clock = clock

    def create(self, session: PlatformSession, name: str, role: OperatorRole) -> Operator:
        """Add an operator."""
        operator = Operator(name=name, role=role, created_at=self._clock())
        session.add(operator)
        session.flush()
        return operator

    def issue_key(
        self,
        session: PlatformSession,
        operator: Operator,
        *,
        name: str,
        lifetime: timedelta | None = DEFAULT_LIFETIME,
    ) -> IssuedOperatorKey:
        """Make a key for the operator; without a lifetime it does not expire."""
        token = make_token(OPERATOR_PREFIX)
        now = self._clock()
        key = OperatorKey(
            id=token.key_id,
            operator_id=operator.id,
            name=name,
            mac=self._mac(token.text),
            created_at=now,
            expires_at=None if lifetime is None else now + lifetime,
        )
        session.add(key)
        session.flush()
        return IssuedOperatorKey(key, token.text)

    def authenticate(self, session: PlatformSession, text: str) -> OperatorPrincipal:
        """Which operator calls with this key. Raises InvalidApiKey."""
        token = parse_token(text)
        found = repository.find_key(session, token.key_id)
        expected = _UNKNOWN_MAC if found is None else found[0].mac
        matches = hmac.compare_digest(expected, self._mac(token.text))
        if found is None or not matches:
            raise InvalidApiKey
        key, operator = found
        if key.revoked_at is not None or operator.disabled_at is not None:
            raise ApiKeyRevoked
        if key.expires_at is not None and key.expires_at <= self._clock():
            raise ApiKeyExpired
        return OperatorPrincipal(operator.id, operator.name, operator.role)

    def _mac(self, text: str) -> bytes:
        return hmac.digest(self._pepper, text.encode(), hashlib.sha256)
