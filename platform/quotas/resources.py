"""Limits on the resources that a tenant owns: adapters, versions, stored bytes, keys, users.

A check locks the tenant's quota until the end of its unit of work, so only one of several
concurrent requests gets the last place. Callers check first and add the resource in the same unit
of work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum

from ..errors import QuotaExceeded
from ..sessions import TenantSession
from . import repository


class Resource(StrEnum):
    """The counted resources; each has a limit of the same name in `Quota`."""

    ADAPTERS = "adapters"
    """Adapters with at least one version."""
    VERSIONS_PER_ADAPTER = "versions_per_adapter"
    """All versions that are not deleted, including rejected ones."""
    STORED_BYTES = "stored_bytes"
    """Everything that is not removed from the store; equal content counts once."""
    KEYS = "keys"
    """Keys that are neither revoked nor expired."""
    USERS = "users"
    """Users that are not disabled."""


_WORDS: Mapping[Resource, str] = {
    Resource.ADAPTERS: "adapters",
    Resource.VERSIONS_PER_ADAPTER: "versions of one adapter",
    Resource.STORED_BYTES: "stored bytes",
    Resource.KEYS: "keys",
    Resource.USERS: "users",
}
_COUNTS: Mapping[Resource, Callable[[TenantSession], int]] = {
    Resource.ADAPTERS: repository.count_adapters,
    Resource.VERSIONS_PER_ADAPTER: repository.most_versions_of_an_adapter,
    Resource.STORED_BYTES: repository.sum_stored_bytes,
    Resource.KEYS: repository.count_usable_keys,
    Resource.USERS: repository.count_active_users,
}


def count(session: TenantSession, resource: Resource) -> int:
    """The tenant's present amount; for versions, that of its largest adapter."""
    return _COUNTS[resource](session)


def check_room(session: TenantSession, resource: Resource) -> None:
    """Check that one more fits. Raises QuotaExceeded."""
    limit = _limit(session, resource)
    if limit is not None:
        _check(resource, limit, count(session, resource), 1)


def check_room_for_successor(session: TenantSession) -> None:
    """Check that a key's successor fits: each of the allowed keys may have one successor.

    Raises QuotaExceeded if keys are rotated repeatedly within the overlap.
    """
    limit = _limit(session, Resource.KEYS)
    used = count(session, Resource.KEYS)
    if limit is not None and used + 1 > 2 * limit:
        raise QuotaExceeded(_WORDS[Resource.KEYS], limit=limit, used=used, wanted=1)


def check_room_for_version(session: TenantSession, adapter_name: str) -> None:
    """Check that one more version of this adapter fits, and the adapter if it is new. Raises
    QuotaExceeded."""
    limit = _limit(session, Resource.VERSIONS_PER_ADAPTER)
    used = repository.count_versions(session, adapter_name)
    if limit is not None:
        _check(Resource.VERSIONS_PER_ADAPTER, limit, used, 1)
    if not used:
        check_room(session, Resource.ADAPTERS)


def check_room_for_upload(session: TenantSession, size_bytes: int) -> None:
    """Check that these bytes fit next to stored content and uploads. Raises QuotaExceeded."""
    limit = _limit(session, Resource.STORED_BYTES)
    if limit is not None:
        used = count(session, Resource.STORED_BYTES) + repository.sum_expected_bytes(session)
        _check(Resource.STORED_BYTES, limit, used, size_bytes)


def check_room_for_content(session: TenantSession, digest: str, size_bytes: int) -> None:
    """Check that this content fits next to stored content, or is stored already. Raises
    QuotaExceeded."""
    limit = _limit(session, Resource.STORED_BYTES)
    if limit is not None and not repository.is_stored(session, digest):
        _check(Resource.STORED_BYTES, limit, count(session, Resource.STORED_BYTES), size_bytes)


def _limit(session: TenantSession, resource: Resource) -> int | None:
    quota = repository.lock_quota(session)
    limit: int | None = None if quota is None else getattr(quota, resource)
    return limit


def _check(resource: Resource, limit: int, used: int, wanted: int) -> None:
    if used + wanted > limit:
        raise QuotaExceeded(_WORDS[resource], limit=limit, used=used, wanted=wanted)
