"""Finds a tenant's adapters and versions by name and number, or raises a not-found error.

Versions that are being deleted are not found, except by functions whose name contains `known`,
which read their history.
"""

from __future__ import annotations

from ...adapters.identity import AdapterKey
from ..errors import AdapterNotFound, AdapterNotReady, TenantNotFound, VersionNotFound
from ..sessions import TenantSession
from . import repository
from .models import Adapter, AdapterVersion
from .states import VersionState


def lock_catalog(session: TenantSession) -> None:
    """Make the tenant's other catalog writers wait. Raises TenantNotFound."""
    if not repository.lock_catalog(session):
        raise TenantNotFound


def get_adapter(session: TenantSession, name: str) -> Adapter:
    """The adapter with its visible versions and aliases. Raises AdapterNotFound."""
    adapter = repository.find_visible_adapter(session, name)
    if adapter is None:
        raise no_adapter(name)
    return adapter


def contents_of(session: TenantSession, name: str) -> list[AdapterKey]:
    """The contents of the adapter's visible versions. Raises AdapterNotFound."""
    adapter = get_adapter(session, name)
    return [AdapterKey(version.tenant_id, version.digest) for version in adapter.versions]


def get_bare_adapter(session: TenantSession, name: str) -> Adapter:
    """The adapter's own row only. Raises AdapterNotFound."""
    adapter = repository.find_adapter(session, name)
    if adapter is None or not adapter.is_visible:
        raise no_adapter(name)
    return adapter


def get_known_adapter(session: TenantSession, name: str) -> Adapter:
    """The row of an adapter that is or was. Raises AdapterNotFound."""
    adapter = repository.find_adapter(session, name)
    if adapter is None:
        raise no_adapter(name)
    return adapter


def get_version(session: TenantSession, name: str, number: int) -> AdapterVersion:
    """One visible version. Raises AdapterNotFound or VersionNotFound."""
    adapter = get_bare_adapter(session, name)
    version = repository.find_visible_version(session, adapter.id, number)
    if version is None:
        raise _no_version(name, number)
    return version


def version_of(adapter: Adapter, number: int) -> AdapterVersion:
    """One of the visible versions that were loaded with the adapter. Raises VersionNotFound."""
    for version in adapter.versions:
        if version.number == number:
            return version
    raise _no_version(adapter.name, number)


def get_ready_version(session: TenantSession, name: str, number: int) -> AdapterVersion:
    """One version that may be used. Raises as `get_version`, and AdapterNotReady."""
    version = get_version(session, name, number)
    if version.state is not VersionState.READY:
        raise AdapterNotReady(f"{name}@{number}", state=version.state, reason=version.reason_code)
    return version


def get_known_version(session: TenantSession, name: str, number: int) -> AdapterVersion:
    """A version that is or was. Raises AdapterNotFound or VersionNotFound."""
    adapter = get_known_adapter(session, name)
    version = repository.find_version_by_number(session, adapter.id, number)
    if version is None:
        raise _no_version(name, number)
    return version


def no_adapter(name: str) -> AdapterNotFound:
    """The error for an adapter that does not exist or that the caller may not see."""
    return AdapterNotFound(f"There is no adapter {name!r}.")


def _no_version(name: str, number: int) -> VersionNotFound:
    return VersionNotFound(f"The adapter {name!r} has no version {number}.")
