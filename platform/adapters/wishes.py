"""Wishes: tenants' pins and prefetches, and until when they hold.

They are the desired state, to which servers converge, and survive restarts. Only ready versions can
be wished for. A deletion removes the wishes for the deleted version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from ...adapters.identity import AdapterKey
from ..base import utc_now
from ..errors import InvalidValue, TooManyPins
from ..sessions import PlatformSession, TenantSession
from . import repository
from .lookup import get_bare_adapter, get_ready_version, get_version, lock_catalog
from .models import AdapterWish
from .states import WishKind

MAX_TTL_SECONDS = 366 * 24 * 3600.0


class WishedContent(NamedTuple):
    """Content that some version's wish names."""

    key: AdapterKey
    kind: WishKind
    expires_at: datetime | None
    """None: never. Of several wishes for the same content, the latest."""


def set_wish(
    session: TenantSession,
    name: str,
    number: int,
    kind: WishKind,
    *,
    ttl_seconds: float | None = None,
    created_by: str | None = None,
    max_pins: int | None = None,
    now: datetime | None = None,
) -> AdapterWish:
    """Wish for a ready version, for `ttl_seconds` from now or without limit; repeating restarts the
    time.

    `max_pins` limits the tenant's concurrently pinned versions.

    Raises InvalidValue, AdapterNotFound, VersionNotFound, AdapterNotReady or TooManyPins.
    """
    now = now or utc_now()
    expires_at = None if ttl_seconds is None else now + _check_ttl(ttl_seconds)
    lock_catalog(session)
    version = get_ready_version(session, name, number)
    if kind is WishKind.PIN:
        _check_num_pins(session, version.id, max_pins, now)
    wish = repository.find_wish(session, version.id, kind)
    if wish is None:
        wish = AdapterWish(version_id=version.id, adapter_id=version.adapter_id, kind=kind)
        session.add(wish)
    wish.created_at, wish.expires_at, wish.created_by = now, expires_at, created_by
    session.flush()
    session.refresh(wish, ["version"])
    return wish


def remove_wish(session: TenantSession, name: str, number: int, kind: WishKind) -> bool:
    """Wish no more; False if there was no such wish. Raises AdapterNotFound or VersionNotFound."""
    lock_catalog(session)
    wish = repository.find_wish(session, get_version(session, name, number).id, kind)
    if wish is None:
        return False
    session.delete(wish)
    session.flush()
    return True


def list_wishes(
    session: TenantSession, name: str, *, now: datetime | None = None
) -> Sequence[AdapterWish]:
    """The live wishes for the adapter's versions, with these, by number. Raises AdapterNotFound."""
    adapter = get_bare_adapter(session, name)
    return repository.list_live_wishes(session, adapter.id, now or utc_now())


def list_live_wishes_of_all_tenants(
    session: PlatformSession, now: datetime, *, base_id: str | None = None
) -> Sequence[WishedContent]:
    """The current wishes, each content once per kind, the oldest first.

    `base_id`: only versions for this base model.
    """
    wished: dict[tuple[AdapterKey, WishKind], WishedContent] = {}
    for wish in repository.list_live_wishes_of_all_tenants(session, now, base_id=base_id):
        key = AdapterKey(wish.tenant_id, wish.version.digest)
        expires_at = wish.expires_at
        if (key, wish.kind) in wished:
            expires_at = _later(expires_at, wished[key, wish.kind].expires_at)
        wished[key, wish.kind] = WishedContent(key, wish.kind, expires_at)
    return list(wished.values())


def remove_expired(session: PlatformSession, now: datetime) -> int:
    """Forget the wishes that have expired, of all tenants; how many there were."""
    return repository.delete_expired_wishes_of_all_tenants(session, now)


def _check_ttl(seconds: float) -> timedelta:
    if not (math.isfinite(seconds) and 0 < seconds <= MAX_TTL_SECONDS):
        raise InvalidValue(
            f"The time to live must be more than 0 and at most {MAX_TTL_SECONDS:.0f} seconds.",
            param="ttl_seconds",
        )
    return timedelta(seconds=seconds)


def _check_num_pins(
    session: TenantSession, version_id: str, max_pins: int | None, now: datetime
) -> None:
    if max_pins is None:
        return
    if repository.count_other_pins(session, version_id, now) >= max_pins:
        raise TooManyPins(max_pins)


def _later(first: datetime | None, second: datetime | None) -> datetime | None:
    return None if first is None or second is None else max(first, second)
