"""The states of versions and uploads, and the allowed transitions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from ..errors import InvalidTransition


class VersionState(StrEnum):
    """The states of an adapter version."""

    VALIDATED = "validated"
    """Intake accepted it; its block is stored."""
    ATTESTING = "attesting"
    """Probe requests measure its effect."""
    READY = "ready"
    """It may be used."""
    REJECTED = "rejected"
    """Attestation failed; the reason is recorded."""
    DELETING = "deleting"
    """No new use; it is being drained and evicted from every tier."""
    DELETED = "deleted"
    """Gone from every tier. The row stays: its number is never given again."""


class UploadState(StrEnum):
    """The states of an upload."""

    RECEIVING = "receiving"
    """Bytes are missing, or the examination has not been requested."""
    VALIDATING = "validating"
    """All bytes are here; intake reads them."""
    ACCEPTED = "accepted"
    """It became a version, or was one already."""
    REJECTED = "rejected"
    """Intake refused it; the reason is recorded."""
    ABANDONED = "abandoned"
    """Its owner gave it up, or never sent the rest."""


class AliasAction(StrEnum):
    """How an alias came to its target."""

    SET = "set"
    """It was pointed at one version."""
    CANARY = "canary"
    """It was split between a version and a canary."""
    ROLLBACK = "rollback"
    """It went back to the target before, or its canary ended by itself."""
    REMOVE = "remove"
    """It points at nothing any more."""


class WishKind(StrEnum):
    """How much a tenant wants a version to be near the device."""

    PIN = "pin"
    """Brought to the device and never evicted."""
    PREFETCH = "prefetch"
    """Loaded as close to the device as there is room, before it is requested."""


LIVE_STATES = frozenset({VersionState.VALIDATED, VersionState.ATTESTING, VersionState.READY})
"""On the way to use, or in it: an adapter has the same content at most once among these."""

VISIBLE_STATES = frozenset(VersionState) - {VersionState.DELETING, VersionState.DELETED}
"""What a tenant sees, and what keeps the stored object: all but the deleted."""

UNFINISHED_STATES = frozenset(
    {VersionState.VALIDATED, VersionState.ATTESTING, VersionState.DELETING}
)
"""The work in these states must be continued, also after a crash."""

UNFINISHED_UPLOAD_STATES = frozenset({UploadState.RECEIVING, UploadState.VALIDATING})
"""The bytes of these are on a server's disk."""

CLOSED_IN_VAIN_STATES = frozenset({UploadState.REJECTED, UploadState.ABANDONED})
"""These produced no version, so their declarations are no longer needed."""

_VERSION_TRANSITIONS: Mapping[StrEnum, frozenset[StrEnum]] = {
    VersionState.VALIDATED: frozenset(
        {VersionState.ATTESTING, VersionState.REJECTED, VersionState.DELETING}
    ),
    VersionState.ATTESTING: frozenset(
        {VersionState.READY, VersionState.REJECTED, VersionState.DELETING}
    ),
    VersionState.READY: frozenset({VersionState.DELETING}),
    VersionState.REJECTED: frozenset({VersionState.DELETING}),
    VersionState.DELETING: frozenset({VersionState.DELETED}),
    VersionState.DELETED: frozenset(),
}
_UPLOAD_TRANSITIONS: Mapping[StrEnum, frozenset[StrEnum]] = {
    UploadState.RECEIVING: frozenset({UploadState.VALIDATING, UploadState.ABANDONED}),
    UploadState.VALIDATING: frozenset(
        {UploadState.ACCEPTED, UploadState.REJECTED, UploadState.RECEIVING}
    ),
    UploadState.ACCEPTED: frozenset(),
    UploadState.REJECTED: frozenset(),
    UploadState.ABANDONED: frozenset(),
}


def check_version_transition(current: VersionState, target: VersionState) -> None:
    """Raise InvalidTransition unless a version may go from `current` to `target`."""
    _check(_VERSION_TRANSITIONS, current, target)


def check_upload_transition(current: UploadState, target: UploadState) -> None:
    """Raise InvalidTransition unless an upload may go from `current` to `target`."""
    _check(_UPLOAD_TRANSITIONS, current, target)


def _check(
    transitions: Mapping[StrEnum, frozenset[StrEnum]], current: StrEnum, target: StrEnum
) -> None:
    if target not in transitions[current]:
        raise InvalidTransition(current, target)
