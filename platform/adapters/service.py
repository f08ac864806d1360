"""The catalog's service: versions, their states and their deletion.

It also exports the functions of `aliases`, so callers need one module only.

Every writer first locks its tenant's catalog, so numbers, digests and aliases need no retries. The
caller orders the effects outside the database around these steps: bytes are stored before
`create_version`, and evicted and removed between `begin_…_deletion` and `finish_deletion`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...adapters.identity import AdapterKey
from ..base import JsonObject, utc_now
from ..errors import AdapterBeingDeleted, VersionAliased, VersionNotFound
from ..names import check_adapter_name
from ..quotas import service as quotas
from ..sessions import TenantSession
from . import repository
from .aliases import (
    end_canary,
    find_limits,
    forget_alias,
    get_alias,
    get_alias_to_change,
    list_alias_changes,
    remove_alias,
    rollback_alias,
    set_alias,
    set_free_aliases,
)
from .announcements import announce_deleted, announce_ready, announce_rejected
from .canary import Canary
from .history import DeletionReceipt, VersionTransition
from .lookup import (
    get_adapter,
    get_known_adapter,
    get_known_version,
    get_version,
    lock_catalog,
)
from .models import Adapter, AdapterVersion
from .sampling import forget_sampling
from .states import VISIBLE_STATES, VersionState, check_version_transition

__all__ = [
    "Canary",
    "CreatedVersion",
    "Deletion",
    "NewVersion",
    "VersionHistory",
    "begin_adapter_deletion",
    "begin_attestation",
    "begin_version_deletion",
    "create_version",
    "end_canary",
    "find_limits",
    "finish_deletion",
    "get_adapter",
    "get_alias",
    "get_alias_to_change",
    "get_version",
    "is_object_referenced",
    "list_alias_changes",
    "list_callable_adapters",
    "list_receipts",
    "list_transitions",
    "lock_deletion",
    "lock_unreferenced",
    "mark_ready",
    "mark_rejected",
    "remove_alias",
    "resume_deletion",
    "rollback_alias",
    "set_alias",
    "set_free_aliases",
    "version_history",
]


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


class VersionHistory(NamedTuple):
    """A version and the states it came to."""

    version: AdapterVersion
    transitions: Sequence[VersionTransition]
    """In order; the first is its creation."""


# --- reading ------------------------------------------------------------------------------------


def list_callable_adapters(
    session: TenantSession, base_id: str, *, names: Collection[str] | None = None
) -> Sequence[Adapter]:
    """The adapters that a request can name while this base is served, by name; rows only.

    Where `names` are given, of these.
    """
    return repository.list_callable_adapters(session, base_id, names=names)


def list_classifier_ids(session: TenantSession, base_id: str) -> set[str]:
    """The adapters whose newest ready version for this base is a classifier."""
    return repository.list_classifier_ids(session, base_id)


def version_history(session: TenantSession, name: str, number: int) -> VersionHistory:
    """How the version came to its state; of a deleted one too.

    Raises AdapterNotFound or VersionNotFound for what never was.
    """
    version = get_known_version(session, name, number)
    return VersionHistory(version, repository.list_transitions(session, version.id))


def list_transitions(session: TenantSession, name: str, number: int) -> Sequence[VersionTransition]:
    """The states that the version came to; raises as `version_history`."""
    return version_history(session, name, number).transitions


def list_receipts(session: TenantSession, name: str) -> Sequence[DeletionReceipt]:
    """The receipts of the adapter's deleted versions, by number, even when nothing else is left.

    Raises AdapterNotFound if no adapter ever had this name.
    """
    adapter = get_known_adapter(session, name)
    return repository.list_receipts(session, adapter.id)


def is_object_referenced(session: TenantSession, digest: str) -> bool:
    """A version that is not being deleted still needs the tenant's object of this content."""
    return repository.has_version(session, digest, VISIBLE_STATES)


def lock_unreferenced(session: TenantSession, digest: str) -> bool:
    """Whether nothing needs the tenant's object of this content, nor will before this unit of work
    ends: a push of it either has its version by now, or gets it when the object is gone."""
    repository.lock_catalog(session)  # a tenant that does not exist gets no version either
    return not is_object_referenced(session, digest)


# --- versions -----------------------------------------------------------------------------------


def create_version(session: TenantSession, new: NewVersion) -> CreatedVersion:
    """Give the content the adapter's next number; the adapter is created if it does not exist.

    Content that the adapter already has keeps its number, unless it was rejected. Raises
    InvalidValue, QuotaExceeded, and AdapterBeingDeleted while the same content is being deleted.
    """
    check_adapter_name(new.adapter_name)
    lock_catalog(session)
    if repository.has_version(session, new.digest, {VersionState.DELETING}):
        raise AdapterBeingDeleted
    adapter = _find_or_add_adapter(session, new.adapter_name)
    existing = repository.find_same_content(session, adapter.id, new.digest)
    if existing is not None:
        return CreatedVersion(existing, is_new=False)
    quotas.check_room_for_version(session, new.adapter_name)
    quotas.check_room_for_content(session, new.digest, new.size_bytes)
    return CreatedVersion(_add_version(session, adapter, new), is_new=True)


def note_stored(session: TenantSession, digest: str, object_sha256: str, size_bytes: int) -> None:
    """The tenant's object with this content was written again, perhaps in another block format."""
    for version in repository.list_versions_of_content(session, digest):
        version.object_sha256, version.size_bytes = object_sha256, size_bytes


def begin_attestation(session: TenantSession, version_id: str) -> AdapterVersion:
    """The probes are about to run. Raises VersionNotFound or InvalidTransition."""
    return _advance(session, version_id, VersionState.ATTESTING)


def mark_ready(
    session: TenantSession, version_id: str, *, attestation_report: JsonObject
) -> AdapterVersion:
    """The version may be used from now on. Raises VersionNotFound or InvalidTransition."""
    version = _advance(session, version_id, VersionState.READY)
    version.attestation_report = attestation_report
    announce_ready(session, version)
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
    version = _advance(session, version_id, VersionState.REJECTED, reason=reason, message=message)
    version.reason_code, version.reason_message = reason, message
    version.attestation_report = attestation_report
    announce_rejected(session, version)
    return version


# --- deletion -----------------------------------------------------------------------------------


def begin_version_deletion(session: TenantSession, name: str, number: int) -> Deletion:
    """Hide the version: no name resolves to it any more.

    Raises AdapterNotFound, VersionNotFound, or VersionAliased: what callers reach by an alias does
    not change by a deletion.
    """
    lock_catalog(session)
    version = get_version(session, name, number)
    aliases = repository.list_alias_names(session, version)
    if aliases:
        raise VersionAliased(list(aliases))
    _hide(session, version)
    return _deletion(session, version)


def begin_adapter_deletion(
    session: TenantSession, name: str, *, deleted_by: str | None = None
) -> list[Deletion]:
    """Hide the adapter: its aliases go, its versions are to disappear. Raises AdapterNotFound."""
    lock_catalog(session)
    adapter = get_adapter(session, name)
    for alias in adapter.aliases:
        forget_alias(session, alias, changed_by=deleted_by)
    versions = list(adapter.versions)
    for version in versions:
        _hide(session, version)
    return [_deletion(session, version) for version in versions]


def resume_deletion(session: TenantSession, version_id: str) -> Deletion:
    """The remaining work for a version that is `deleting`, after a crash.

    Raises VersionNotFound, or InvalidTransition in another state.
    """
    version = _get_version(session, version_id)
    check_version_transition(version.state, VersionState.DELETED)
    return _deletion(session, version)


def lock_deletion(session: TenantSession, version_id: str) -> Deletion:
    """`resume_deletion`; until this unit of work ends, the deletion does not finish, and no version
    of this content is created."""
    lock_catalog(session)
    return resume_deletion(session, version_id)


def finish_deletion(
    session: TenantSession, version_id: str, *, receipt: JsonObject | None = None
) -> AdapterVersion:
    """The content is removed from every tier; `receipt` has the removed amounts.

    Raises VersionNotFound or InvalidTransition.
    """
    requested_at = _get_version(session, version_id).state_changed_at
    version = _advance(session, version_id, VersionState.DELETED)
    written = DeletionReceipt(
        version_id=version.id,
        adapter_id=version.adapter_id,
        version_number=version.number,
        digest=version.digest,
        requested_at=requested_at,
        finished_at=version.state_changed_at,
        receipt=receipt,
    )
    session.add(written)
    session.flush()
    announce_deleted(session, version, written)
    return version


# --- inside -------------------------------------------------------------------------------------


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
    adapter.is_visible = True
    session.add(version)
    session.flush()
    _write_down(session, version)
    return version


def _hide(session: TenantSession, version: AdapterVersion) -> None:
    """Begin the version's deletion: it no longer resolves, and its wishes are removed."""
    for wish in repository.list_wishes_for_version(session, version.id):
        session.delete(wish)
    _advance(session, version.id, VersionState.DELETING)
    adapter = repository.find_adapter_of(session, version)
    adapter.is_visible = repository.has_visible_version(session, adapter.id)
    if not adapter.is_visible:  # a later adapter of this name asks its owner again
        forget_sampling(session, adapter.id)
    session.flush()


def _advance(
    session: TenantSession,
    version_id: str,
    target: VersionState,
    *,
    reason: str | None = None,
    message: str | None = None,
) -> AdapterVersion:
    """The one place where a version's state changes, and where that is written down."""
    lock_catalog(session)
    version = _get_version(session, version_id)
    check_version_transition(version.state, target)
    version.state = target
    version.state_changed_at = utc_now()
    session.flush()
    _write_down(session, version, reason=reason, message=message)
    return version


def _write_down(
    session: TenantSession,
    version: AdapterVersion,
    *,
    reason: str | None = None,
    message: str | None = None,
) -> None:
    number = repository.last_transition_number(session, version.id) + 1
    session.add(
        VersionTransition(
            version_id=version.id,
            number=number,
            state=version.state,
            reason_code=reason,
            reason_message=message,
            at=version.created_at if number == 1 else version.state_changed_at,
        )
    )
    session.flush()


def _get_version(session: TenantSession, version_id: str) -> AdapterVersion:
    version = repository.find_version(session, version_id)
    if version is None:
        raise VersionNotFound
    return version


def _deletion(session: TenantSession, version: AdapterVersion) -> Deletion:
    key = AdapterKey(version.tenant_id, version.digest)
    return Deletion(version.id, version.number, key, is_object_referenced(session, version.digest))
