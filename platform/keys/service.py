"""Issuing, checking and revoking API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from ..base import utc_now
from ..errors import (
    ApiKeyExpired,
    ApiKeyRevoked,
    InvalidApiKey,
    InvalidValue,
    KeyNotFound,
    TenantSuspended,
)
from ..sessions import PlatformSession, TenantSession
from ..tenants.models import Tenant
from . import repository
from .models import MAX_KEY_NAME_LENGTH, ApiKey
from .principal import Actor, ActorKind, Principal, Scope
from .token import make_token, parse_token

LAST_USED_GRANULARITY = timedelta(hours=1)
_UNKNOWN_MAC = bytes(hashlib.sha256().digest_size)


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """A new key with its text, which can be read here and never again."""

    key: ApiKey
    text: str = field(repr=False)


class ApiKeyService:
    """Keys under one pepper: a key's stored hash is worthless without it."""

    def __init__(self, pepper: bytes, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._pepper = pepper
        self._clock = clock

    def issue(
        self,
        session: TenantSession,
        *,
        name: str,
        scopes: Iterable[Scope],
        expires_at: datetime | None = None,
    ) -> IssuedKey:
        """Make a key for the session's tenant. Raises InvalidValue."""
        token = make_token()
        key = ApiKey(
            id=token.key_id,
            name=_check_key_name(name),
            mac=self._mac(token.text),
            scopes=sorted(set(scopes)),
            expires_at=expires_at,
            created_at=self._clock(),
        )
        session.add(key)
        session.flush()
        return IssuedKey(key, token.text)

    def authenticate(self, session: PlatformSession, text: str) -> Principal:
        """Who calls with this key.

        Raises InvalidApiKey (ApiKeyExpired, ApiKeyRevoked) or TenantSuspended. A key's state is
        told only to those who hold its secret; unknown ids and wrong secrets look and take alike.
        """
        token = parse_token(text)
        found = repository.find_for_any_tenant(session, token.key_id)
        expected = _UNKNOWN_MAC if found is None else found[0].mac
        matches = hmac.compare_digest(expected, self._mac(token.text))
        if found is None or not matches:
            raise InvalidApiKey
        key, tenant = found
        self._check_usable(key, tenant)
        self._note_use(key)
        return Principal(
            tenant_id=tenant.id,
            tenant_slug=tenant.slug,
            actor=Actor(ActorKind.KEY, key.id, key.name),
            scopes=frozenset(map(Scope, key.scopes)),
            key_id=key.id,
            adapters=None if key.adapters is None else frozenset(key.adapters),
            tenant_weight=tenant.weight,
        )

    def list_keys(self, session: TenantSession) -> Sequence[ApiKey]:
        """The tenant's keys, the oldest first, revoked ones included."""
        return repository.list_keys(session)

    def revoke(self, session: TenantSession, key_id: str) -> ApiKey:
        """Refuse this key from now on. Idempotent. Raises KeyNotFound."""
        key = repository.find(session, key_id)
        if key is None:
            raise KeyNotFound(f"No API key has the id {key_id!r}.")
        key.revoked_at = key.revoked_at or self._clock()
        return key

    def _mac(self, text: str) -> bytes:
        return hmac.digest(self._pepper, text.encode(), hashlib.sha256)

    def _check_usable(self, key: ApiKey, tenant: Tenant) -> None:
        if key.revoked_at is not None:
            raise ApiKeyRevoked
        if key.expires_at is not None and key.expires_at <= self._clock():
            raise ApiKeyExpired
        if tenant.is_suspended:
            raise TenantSuspended

    def _note_use(self, key: ApiKey) -> None:
        now = self._clock()
        # Coarse, so that a busy key costs one write an hour instead of one a request.
        if key.last_used_at is None or abs(now - key.last_used_at) >= LAST_USED_GRANULARITY:
            key.last_used_at = now


def _check_key_name(name: str) -> str:
    if not 1 <= len(name) <= MAX_KEY_NAME_LENGTH:
        raise InvalidValue(f"A key's name has 1 to {MAX_KEY_NAME_LENGTH} characters.", param="name")
    return name
