"""The catalog: versions and the states they go through, aliases, deletion.

Every writer first locks its tenant's catalog, so numbers, digests and aliases need no second try.
The caller orders the effects outside the database around these steps: bytes are stored before
`create_version`, evicted and removed between `begin_…_deletion` and `finish_deletion`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...adapters.identity import AdapterKey
from ..base import JsonObject, utc_now
from ..errors import (
    AdapterBeingDeleted,
    AdapterNotFound,
    AdapterNotReady,
    AliasNotFound,
    TenantNotFound,
    VersionAliased,
    VersionNotFound,
)
from ..names import check_adapter_name, check_alias_name
from ..sessions import TenantSession
from . import repository
from .models import Adapter, AdapterAlias, AdapterVersion
from .states import VISIBLE_STATES, VersionState, check_version_transition


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVersion:
    """What intake found, and under which name its owner wants it."""

    adapter_name: str
    digest: str
    base_id: str
    object_sha256: str
    size_bytes: int
    intake_report: JsonObject
    created_by: str | None = None


class CreatedVersion(NamedTuple):
    """The version of the pushed content."""

    version: AdapterVersion
    is_new: bool
    """False: the adapter had this content already, under this number."""


class Deletion(NamedTuple):
    """A version that is to disappear."""

    version_id: str
    number: int
    key: AdapterKey
    is_content_shared: bool
    """Another version of the tenant has the same content: neither evict nor remove it."""


# --- reading ------------------------------------------------------------------------------------


def list_adapters(session: TenantSession) -> Sequence[Adapter]:
    """The tenant's adapters by name, with their visible versions and aliases."""
    return repository.list_visible_adapters(session)


def get_adapter(session: TenantSession, name: str) -> Adapter:
    """The adapter with its visible versions and aliases. Raises AdapterNotFound."""
    adapter = repository.find_visible_adapter(session, name)
    if adapter is None:
        raise AdapterNotFound(f"There is no adapter {name!r}.")
    return adapter


def get_version(session: TenantSession, name: str, number: int) -> AdapterVersion:
    """One visible version. Raises AdapterNotFound or VersionNotFound."""
    adapter = get_adapter(session, name)
    version = repository.find_visible_version(session, adapter.id, number)
    if version is None:
        raise VersionNotFound(f"The adapter {name!r} has no version {number}.")
    return version


def is_object_referenced(session: TenantSession, digest: str) -> bool:
    """A version that is not being deleted still needs the tenant's object of this content."""
    return repository.has_version(session, digest, VISIBLE_STATES)


# --- versions -----------------------------------------------------------------------------------


def create_version(session: TenantSession, new: NewVersion) -> CreatedVersion:
    """Give the content the adapter's next number; the adapter is made if it is not there.

    Content that the adapter has already keeps its number, unless it was rejected. Raises
    InvalidValue, and AdapterBeingDeleted while the same content is on its way out.
    """
    check_adapter_name(new.adapter_name)
    _lock(session)
    if repository.has_version(session, new.digest, {VersionState.DELETING}):
        raise AdapterBeingDeleted
    adapter = _find_or_add_adapter(session, new.adapter_name)
    existing = repository.find_same_content(session, adapter.id, new.digest)
    if existing is not None:
        return CreatedVersion(existing, is_new=False)
    return CreatedVersion(_add_version(session, adapter, new), is_new=True)


def begin_attestation(session: TenantSession, version_id: str) -> AdapterVersion:
    """The probes are about to run. Raises VersionNotFound or InvalidTransition."""
    return _advance(session, version_id, VersionState.ATTESTING)


def mark_ready(
    session: TenantSession, version_id: str, *, attestation_report: JsonObject
) -> AdapterVersion:
    """The version may be used from now on. Raises VersionNotFound or InvalidTransition."""
    version = _advance(session, version_id, VersionState.READY)
    version.attestation_report = attestation_report
    return version


def mark_rejected(
    session: TenantSession,
    version_id: str,
    *,
    reason: str,
    message: str,
    attestation_report: JsonObject | None = None,
) -> AdapterVersion:
    """The version may never be used. Raises VersionNotFound or InvalidTransition."""
    version = _advance(session, version_id, VersionState.REJECTED)
    version.reason_code, version.reason_message = reason, message
    version.attestation_report = attestation_report
    return version


# --- aliases ------------------------------------------------------------------------------------


def set_alias(session: TenantSession, name: str, alias: str, number: int) -> AdapterAlias:
    """Point the alias at a ready version; requests admitted from now on follow it.

    Raises InvalidValue, AdapterNotFound, VersionNotFound or AdapterNotReady.
    """
    check_alias_name(alias)
    _lock(session)
    version = get_version(session, name, number)
    if version.state is not VersionState.READY:
        raise AdapterNotReady(f"{name}@{number}", state=version.state, reason=version.reason_code)
    row = repository.find_alias(session, version.adapter_id, alias)
    if row is None:
        row = AdapterAlias(adapter_id=version.adapter_id, name=alias)
        session.add(row)
    row.version_id = version.id
    session.flush()
    session.refresh(row, ["version"])
    return row


def remove_alias(session: TenantSession, name: str, alias: str) -> None:
    """Forget the alias. Raises AdapterNotFound or AliasNotFound."""
    _lock(session)
    adapter = get_adapter(session, name)
    row = repository.find_alias(session, adapter.id, alias)
    if row is None:
        raise AliasNotFound(f"The adapter {name!r} has no alias {alias!r}.")
    session.delete(row)


# --- deletion -----------------------------------------------------------------------------------


def begin_version_deletion(session: TenantSession, name: str, number: int) -> Deletion:
    """Hide the version: no name resolves to it any more.

    Raises AdapterNotFound, VersionNotFound, or VersionAliased: what callers reach by an alias does
    not change by a deletion.
    """
    _lock(session)
    version = get_version(session, name, number)
    aliases = repository.list_alias_names(session, version.id)
    if aliases:
        raise VersionAliased(list(aliases))
    _advance(session, version.id, VersionState.DELETING)
    return _deletion(session, version)


def begin_adapter_deletion(session: TenantSession, name: str) -> list[Deletion]:
    """Hide the adapter: its aliases go, its versions are to disappear. Raises AdapterNotFound."""
    _lock(session)
    adapter = get_adapter(session, name)
    for alias in adapter.aliases:
        session.delete(alias)
    session.flush()
    versions = list(adapter.versions)
    for version in versions:
        _advance(session, version.id, VersionState.DELETING)
    return [_deletion(session, version) for version in versions]


def resume_deletion(session: TenantSession, version_id: str) -> Deletion:
    """What is left to do for a version that is `deleting`, after a crash.

    Raises VersionNotFound, or InvalidTransition in another state.
    """
    version = _get_version(session, version_id)
    check_version_transition(version.state, VersionState.DELETED)
    return _deletion(session, version)


def finish_deletion(session: TenantSession, version_id: str) -> AdapterVersion:
    """The content is gone from every tier. Raises VersionNotFound or InvalidTransition."""
    return _advance(session, version_id, VersionState.DELETED)


# --- inside -------------------------------------------------------------------------------------


def _lock(session: TenantSession) -> None:
    if not repository.lock_catalog(session):
        raise TenantNotFound


def _find_or_add_adapter(session: TenantSession, name: str) -> Adapter:
    adapter = repository.find_adapter(session, name)
    if adapter is None:
        adapter = Adapter(name=name)
        session.add(adapter)
        session.flush()
    return adapter


def _add_version(session: TenantSession, adapter: Adapter, new: NewVersion) -> AdapterVersion:
    version = AdapterVersion(
        adapter_id=adapter.id,
        number=repository.last_version_number(session, adapter.id) + 1,
        digest=new.digest,
        base_id=new.base_id,
        object_sha256=new.object_sha256,
        size_bytes=new.size_bytes,
        intake_report=new.intake_report,
        created_by=new.created_by,
    )
    session.add(version)
    session.flush()
    return version


def _advance(session: TenantSession, version_id: str, target: VersionState) -> AdapterVersion:
    """The one place where a version's state changes."""
    _lock(session)
    version = _get_version(session, version_id)
    check_version_transition(version.state, target)
    version.state = target
    version.state_changed_at = utc_now()
    session.flush()
    return version


def _get_version(session: TenantSession, version_id: str) -> AdapterVersion:
    version = repository.find_version(session, version_id)
    if version is None:
        raise VersionNotFound
    return version


def _deletion(session: TenantSession, version: AdapterVersion) -> Deletion:
    key = AdapterKey(version.tenant_id, version.digest)
    return Deletion(version.id, version.number, key, is_object_referenced(session, version.digest))
