"""Issues, verifies, rotates and revokes API keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import NamedTuple

from ..audit.event import Party
from ..base import utc_now
from ..budgets import service as budgets
from ..errors import (
    ApiKeyRevoked,
    GrantTooWide,
    InvalidApiKey,
    InvalidTransition,
    InvalidValue,
    KeyNotFound,
    TenantSuspended,
)
from ..keyring import Keyring
from ..names import check_adapter_name
from ..quotas import service as quotas
from ..quotas.caller_limits import copy_caller_limits
from ..quotas.holder import key_holder
from ..quotas.service import Resource
from ..sessions import PlatformSession, TenantSession
from ..tuning import service as tuning
from ..users import service as users
from . import repository
from .models import ApiKey
from .principal import (
    SCOPES_OF_ADAPTERS,
    SYSTEM,
    Actor,
    ActorKind,
    Grant,
    Principal,
    Scope,
)
from .repository import KeyHolder
from .stored_key import (
    LAST_USED_GRANULARITY,
    check_key_name,
    check_networks,
    is_text_of,
    is_use_to_be_noted,
    note_use,
    sign,
)
from .token import make_token, parse_token

__all__ = ["LAST_USED_GRANULARITY", "ApiKeyService", "Authenticated", "IssuedKey"]


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """A new key with its text, which can be read here and never again."""

    key: ApiKey
    text: str = field(repr=False)


class Authenticated(NamedTuple):
    """The caller, and whether the use of the key must be recorded."""

    principal: Principal
    is_use_to_be_noted: bool


class ApiKeyService:
    """Keys under the server's peppers: a key's stored hash is worthless without them."""

    def __init__(self, peppers: Keyring, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._peppers = peppers
        self._clock = clock

    def issue(
        self,
        session: TenantSession,
        *,
        name: str,
        scopes: Iterable[Scope],
        adapters: Iterable[str] | None = None,
        networks: Iterable[str] | None = None,
        user_id: str | None = None,
        expires_at: datetime | None = None,
        issuer: Principal | None = None,
    ) -> IssuedKey:
        """Make a key for the session's tenant; without an issuer it is the system's own doing.

        Raises InvalidValue, UserNotFound, QuotaExceeded, or GrantTooWide for more than the issuer
        or the key's user has.
        """
        wanted = _check_grant(scopes, adapters, networks, expires_at)
        if issuer is not None:
            _check_covered(issuer.grant, wanted, by="your key")
        if user_id is not None:
            role = users.hold_active_user(session, user_id).role
            _check_covered(Grant(role.scopes), wanted, by=f"a user who is {role}")
        quotas.check_room(session, Resource.KEYS)
        return self._add(
            session,
            name=check_key_name(name),
            grant=wanted,
            user_id=user_id,
            created_by=SYSTEM if issuer is None else issuer.actor,
        )

    def authenticate(self, session: PlatformSession, text: str) -> Authenticated:
        """The caller with this key.

        Raises InvalidApiKey (ApiKeyExpired, ApiKeyRevoked) or TenantSuspended. A key's state is
        revealed only to holders of its secret; unknown ids and wrong secrets give the same response
        in the same time.
        """
        token = parse_token(text)
        found = repository.find_for_any_tenant(session, token.key_id)
        is_right = is_text_of(found.key if found else None, token, self._peppers)
        if found is None or not is_right:
            raise InvalidApiKey
        now = self._clock()
        principal = _usable(found, now)
        return Authenticated(principal, is_use_to_be_noted(found.key, self._peppers, now))

    def look_up(self, session: PlatformSession, key_id: str) -> Authenticated:
        """The caller with the key of this id, whose secret was checked earlier. Raises as
        `authenticate`."""
        found = repository.find_for_any_tenant(session, key_id)
        if found is None:
            raise InvalidApiKey
        return Authenticated(_usable(found, self._clock()), is_use_to_be_noted=False)

    def note_use(self, session: PlatformSession, text: str) -> None:
        """Write down that the key was used, and sign it under the present pepper."""
        token = parse_token(text)
        found = repository.find_for_any_tenant(session, token.key_id)
        if found is not None and is_text_of(found.key, token, self._peppers):
            note_use(found.key, token, self._peppers, self._clock())

    def list_keys(
        self,
        session: TenantSession,
        *,
        after: str | None = None,
        limit: int | None = None,
        user_id: str | None = None,
        is_active: bool | None = None,
        viewer: Principal | None = None,
    ) -> Sequence[ApiKey]:
        """The tenant's keys, oldest first, including revoked ones unless only active ones are
        requested.

        At most `limit` after the key `after`. A viewer restricted to adapters sees the keys that
        are restricted to some of them.
        """
        sees_all = viewer is None or viewer.adapters is None
        keys = repository.list_keys(
            session,
            after=after,
            limit=limit if sees_all else None,
            user_id=user_id,
            active_at=self._clock() if is_active else None,
        )
        return keys if sees_all else [key for key in keys if _sees(viewer, key)][:limit]

    def get(
        self, session: TenantSession, key_id: str, *, viewer: Principal | None = None
    ) -> ApiKey:
        """The tenant's key with this id. Raises KeyNotFound, also if the viewer may not see it."""
        return _visible(repository.find(session, key_id), key_id, viewer)

    def get_to_change(
        self, session: TenantSession, key_id: str, *, viewer: Principal | None = None
    ) -> ApiKey:
        """The same, locked until this unit of work ends, its user too. Raises KeyNotFound."""
        user_id = self.get(session, key_id, viewer=viewer).user_id
        if user_id is not None:
            users.hold_user(session, user_id)
        return _visible(repository.find_and_lock(session, key_id), key_id, viewer)

    def rotate(
        self, session: TenantSession, key_id: str, *, overlap: timedelta, issuer: Principal
    ) -> IssuedKey:
        """Make the key's successor, with the same grant, lifetime, limits and budgets; jobs of
        the key pass on to it. The key ends after `overlap`.

        A tenant with all its keys rotates them still: the room is for both of them, once.

        Raises KeyNotFound, GrantTooWide, QuotaExceeded, or InvalidTransition for a key that is not
        in use or has a successor already.
        """
        key = self.get_to_change(session, key_id, viewer=issuer)
        now = self._clock()
        key.check_rotatable(now)
        if key.successor_id is not None:
            raise InvalidTransition("rotated", "rotated")
        jobs = tuning.lock_jobs_of_key(session, key.id)
        successor = replace(
            key.grant, expires_at=None if key.expires_at is None else now + _lifetime(key)
        )
        # A key may extend itself beyond its expiry: rotation is how it avoids expiring.
        is_own = key.id == issuer.key_id
        own = replace(issuer.grant, expires_at=None) if is_own else issuer.grant
        _check_covered(own, successor, by="your key")
        if overlap:
            quotas.check_room_for_successor(session)
        issued = self._add(
            session,
            name=key.name,
            grant=successor,
            user_id=key.user_id,
            created_by=issuer.actor,
        )
        for job in jobs:
            job.key_id = issued.key.id
        budgets.copy_budgets(session, key_holder(key.id), key_holder(issued.key.id))
        copy_caller_limits(session, key_holder(key.id), key_holder(issued.key.id))
        key.successor_id = issued.key.id
        key.expires_at = min(now + overlap, key.expires_at or now + overlap)
        session.flush()
        return issued

    def revoke(
        self, session: TenantSession, key_id: str, *, viewer: Principal | None = None
    ) -> ApiKey:
        """Refuse this key from now on. Idempotent. Raises KeyNotFound."""
        key = self.get_to_change(session, key_id, viewer=viewer)
        key.revoked_at = key.revoked_at or self._clock()
        return key

    def revoke_keys_of_user(self, session: TenantSession, user_id: str) -> int:
        """Revoke all keys of the user permanently; returns how many there were."""
        now = self._clock()
        keys = repository.list_keys(session, user_id=user_id, active_at=now)
        for key in keys:
            key.revoked_at = now
        return len(keys)

    def _add(
        self,
        session: TenantSession,
        *,
        name: str,
        grant: Grant,
        user_id: str | None,
        created_by: Actor,
    ) -> IssuedKey:
        token = make_token()
        key = ApiKey(
            id=token.key_id,
            name=name,
            scopes=sorted(grant.scopes),
            adapters=None if grant.adapters is None else sorted(grant.adapters),
            networks=None if grant.networks is None else [str(net) for net in grant.networks],
            user_id=user_id,
            expires_at=grant.expires_at,
            created_at=self._clock(),
            created_by=str(created_by),
        )
        sign(key, token, self._peppers)
        session.add(key)
        session.flush()
        return IssuedKey(key, token.text)


def _usable(found: KeyHolder, now: datetime) -> Principal:
    principal = _principal(found)
    try:
        _check_usable(found, now)
    except (InvalidApiKey, TenantSuspended) as refusal:
        refusal.refused = Party(principal.tenant_id, principal.actor)
        raise
    return principal


def _check_usable(found: KeyHolder, now: datetime) -> None:
    found.key.check_usable(now)
    if found.user is not None and found.user.disabled_at is not None:
        raise ApiKeyRevoked
    if found.tenant.is_suspended:
        raise TenantSuspended


def _principal(found: KeyHolder) -> Principal:
    key, tenant, user = found
    grant = key.grant
    actor = Actor(ActorKind.KEY, key.id, key.name)
    if user is not None:
        actor = Actor(ActorKind.USER, user.id, user.email)
    return Principal(
        tenant_id=tenant.id,
        tenant_slug=tenant.slug,
        actor=actor,
        # The user's role may have become less since.
        scopes=grant.scopes if user is None else grant.scopes & user.role.scopes,
        key_id=key.id,
        adapters=grant.adapters,
        networks=grant.networks,
        expires_at=key.expires_at,
        tenant_weight=tenant.weight,
        tenant_slo=tenant.slo,
    )


def _check_grant(
    scopes: Iterable[Scope],
    adapters: Iterable[str] | None,
    networks: Iterable[str] | None,
    expires_at: datetime | None,
) -> Grant:
    grant = Grant(
        scopes=frozenset(scopes),
        adapters=_check_adapters(adapters),
        networks=check_networks(networks),
        expires_at=expires_at,
    )
    if grant.adapters is not None and not grant.scopes <= SCOPES_OF_ADAPTERS:
        allowed = ", ".join(sorted(SCOPES_OF_ADAPTERS))
        raise InvalidValue(
            f"A key restricted to adapters can only have the scopes {allowed}.", param="scopes"
        )
    return grant


def _check_adapters(names: Iterable[str] | None) -> frozenset[str] | None:
    if names is None:
        return None
    checked = frozenset(check_adapter_name(name, param="adapters") for name in names)
    if not checked:
        raise InvalidValue("A key restricted to adapters must name at least one.", param="adapters")
    return checked


def _check_covered(own: Grant, wanted: Grant, *, by: str) -> None:
    param = own.excess(wanted)
    if param == "scopes":
        missing = ", ".join(sorted(wanted.scopes - own.scopes))
        raise GrantTooWide(f"Beyond {by}: {missing}.", param=param)
    if param == "expires_at":
        assert own.expires_at is not None, "what has no end covers every end"
        end = own.expires_at.isoformat(timespec="seconds")
        raise GrantTooWide(
            f"A key cannot expire after {by}, which expires at {end}.", param="expires_in_days"
        )
    if param is not None:
        raise GrantTooWide(f"The {param} must be among those of {by}.", param=param)


def _sees(viewer: Principal | None, key: ApiKey) -> bool:
    return viewer is None or viewer.grant.covers_adapters(key.grant.adapters)


def _visible(key: ApiKey | None, key_id: str, viewer: Principal | None) -> ApiKey:
    if key is None or not _sees(viewer, key):
        raise KeyNotFound(f"No API key has the id {key_id!r}.")
    return key


def _lifetime(key: ApiKey) -> timedelta:
    assert key.expires_at is not None
    return key.expires_at - key.created_at
