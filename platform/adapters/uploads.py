"""Uploads: resumable by offset, complete when all declared bytes have arrived.

The caller stores the bytes; this module records what may be acknowledged. Bytes are on the disk, or
in the store, before `advance_upload` commits, so a crash never loses an acknowledged byte.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from ..base import utc_now
from ..errors import (
    InvalidTransition,
    InvalidValue,
    TooManyParts,
    UploadConflict,
    UploadNotFound,
)
from ..names import check_adapter_name, check_alias_name
from ..quotas import service as quotas
from ..sessions import TenantSession
from . import repository
from .models import SHA256_HEX_LENGTH, AdapterVersion, Upload
from .states import (
    CLOSED_IN_VAIN_STATES,
    LIVE_STATES,
    UNFINISHED_UPLOAD_STATES,
    UploadState,
    check_upload_transition,
)
from .upload_part import MAX_PARTS, UploadPart

_HEX_DIGITS = frozenset(string.digits + "abcdef")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewUpload:
    """What the owner declares before sending the weights."""

    adapter_name: str
    config_json: str
    size_bytes: int
    sha256: str
    """64 hexadecimal digits, lower case."""
    server_id: str
    """The server that takes the bytes."""
    is_in_store: bool = False
    """The bytes are kept in the store, so that any server takes the next ones."""
    aliases: tuple[str, ...] = ()
    created_by: str | None = None

    @property
    def num_bytes(self) -> int:
        """Of the weights and their configuration."""
        return self.size_bytes + len(self.config_json)


def open_upload(session: TenantSession, new: NewUpload) -> Upload:
    """Expect these bytes. Raises InvalidValue."""
    check_adapter_name(new.adapter_name)
    for alias in new.aliases:
        check_alias_name(alias, param="aliases")
    upload = Upload(
        adapter_name=new.adapter_name,
        config_json=new.config_json,
        size_bytes=_check_size(new.size_bytes),
        sha256=_check_sha256(new.sha256),
        received_bytes=0,
        aliases=list(new.aliases),
        created_by=new.created_by,
        server_id=new.server_id,
        parts=[] if new.is_in_store else None,
    )
    session.add(upload)
    session.flush()
    return upload


def open_or_resume_upload(session: TenantSession, new: NewUpload) -> Upload:
    """The unfinished upload with the declaration of `new`, or a new one.

    So an interrupted client finds its upload again. Raises InvalidValue, and QuotaExceeded if the
    tenant has no room for it in addition to its stored content and other uploads.
    """
    for upload in repository.list_receiving_uploads(session, new.sha256):
        is_reached = upload.is_in_store or upload.server_id == new.server_id
        if is_reached and _declares_the_same(upload, new):
            return upload
    check_adapter_name(new.adapter_name)
    quotas.check_room_for_version(session, new.adapter_name)
    quotas.check_room_for_upload(session, new.size_bytes)
    return open_upload(session, new)


def find_known_content(
    session: TenantSession, new: NewUpload, *, base_id: str
) -> AdapterVersion | None:
    """The adapter's live version for `base_id` from these weights and this configuration."""
    return repository.find_live_version_of_upload(
        session,
        new.adapter_name,
        sha256=new.sha256,
        config_json=new.config_json,
        base_id=base_id,
    )


class KnownContent(NamedTuple):
    """A version, and the upload that was accepted for it without its bytes."""

    version: AdapterVersion
    upload: Upload


def accept_known_content(
    session: TenantSession, new: NewUpload, version_id: str
) -> KnownContent | None:
    """An accepted upload of what `new` declares, which this version has already.

    Nothing has to be sent then, and what `new` asks for besides, its aliases, is written down. None
    if the version does not live any more. Raises InvalidValue.
    """
    repository.lock_catalog(session)
    version = repository.find_version(session, version_id)
    if version is None or version.state not in LIVE_STATES:
        return None
    upload = open_upload(session, new)
    upload.received_bytes = upload.size_bytes
    begin_validation(session, upload.id)
    return KnownContent(version, mark_accepted(session, upload.id, version_id))


def get_upload(session: TenantSession, upload_id: str) -> Upload:
    """The upload of this id. Raises UploadNotFound."""
    upload = repository.find_upload(session, upload_id)
    if upload is None:
        raise UploadNotFound
    return upload


def list_unfinished_uploads(session: TenantSession) -> Sequence[Upload]:
    """The tenant's uploads that are not finished, the oldest first."""
    return repository.list_unfinished_uploads(session)


def advance_upload(
    session: TenantSession,
    upload_id: str,
    *,
    offset: int,
    num_bytes: int,
    part: UploadPart | None = None,
) -> Upload:
    """Acknowledge the bytes from `offset` on; `part` says where they are in the store, if there.

    Raises UploadNotFound, InvalidTransition once the upload is closed, UploadConflict if the bytes
    do not begin at the upload's end or exceed its declared size, and TooManyParts.
    """
    upload = get_upload(session, upload_id)
    check_upload_transition(upload.state, UploadState.VALIDATING)
    end = offset + num_bytes
    if offset != upload.received_bytes or not offset <= end <= upload.size_bytes:
        raise _conflict(upload)
    if part is not None:
        parts = upload.stored_parts
        if len(parts) >= MAX_PARTS:
            raise TooManyParts(MAX_PARTS)
        upload.parts = [*parts, part]
    upload.received_bytes = end
    upload.updated_at = utc_now()
    return upload


def begin_validation(
    session: TenantSession, upload_id: str, *, server_id: str | None = None
) -> Upload:
    """All bytes are here and go to intake, at `server_id` if that is another server now.

    Raises UploadNotFound, InvalidTransition, and UploadConflict if bytes are missing.
    """
    upload = get_upload(session, upload_id)
    if upload.state is UploadState.RECEIVING and upload.received_bytes != upload.size_bytes:
        raise _conflict(upload)
    if server_id is not None:
        upload.server_id = server_id
    return _advance(session, upload_id, UploadState.VALIDATING)


def take_over(session: TenantSession, upload_id: str, *, gone_id: str, server_id: str) -> bool:
    """Examine at `server_id` what the server `gone_id` began to examine; False if it has ended, or
    another server did the same. Raises UploadNotFound.
    """
    upload = get_upload(session, upload_id)
    if upload.state is not UploadState.VALIDATING or upload.server_id != gone_id:
        return False
    upload.server_id = server_id
    return True


def has_part(session: TenantSession, upload_id: str, part_id: str) -> bool:
    """Whether an unfinished upload has this part."""
    upload = repository.find_upload(session, upload_id)
    return upload is not None and any(part.id == part_id for part in upload.stored_parts)


def check_acceptable(session: TenantSession, upload_id: str) -> None:
    """Raise InvalidTransition unless the upload is being examined; also UploadNotFound."""
    check_upload_transition(get_upload(session, upload_id).state, UploadState.ACCEPTED)


def mark_accepted(session: TenantSession, upload_id: str, version_id: str) -> Upload:
    """The upload became this version. Raises UploadNotFound or InvalidTransition."""
    upload = _advance(session, upload_id, UploadState.ACCEPTED)
    upload.version_id = version_id
    return upload


def mark_refused(session: TenantSession, upload_id: str, *, reason: str, message: str) -> Upload:
    """Intake refused the upload. Raises UploadNotFound or InvalidTransition."""
    upload = _advance(session, upload_id, UploadState.REJECTED)
    upload.reason_code, upload.reason_message = reason, message
    return upload


def reopen(session: TenantSession, upload_id: str, *, server_id: str) -> Upload:
    """The server failed on bytes that are all here: they wait to be committed again.

    Raises UploadNotFound, and InvalidTransition if it has ended or another server examines it.
    """
    upload = get_upload(session, upload_id)
    if upload.server_id != server_id:
        raise InvalidTransition(upload.state, UploadState.RECEIVING)
    return _advance(session, upload_id, UploadState.RECEIVING)


def abandon_upload(session: TenantSession, upload_id: str) -> Upload:
    """Expect nothing more of the upload. Raises UploadNotFound or InvalidTransition."""
    return _advance(session, upload_id, UploadState.ABANDONED)


def abandon_if_stale(session: TenantSession, upload_id: str, older_than: datetime) -> bool:
    """Expect nothing more of the upload if it received nothing since this moment.

    False if it did. Raises UploadNotFound.
    """
    upload = get_upload(session, upload_id)
    if upload.state is not UploadState.RECEIVING or upload.updated_at >= older_than:
        return False
    _change_state(upload, UploadState.ABANDONED)
    return True


class WantedAlias(NamedTuple):
    """An alias that a push asked for."""

    adapter_name: str
    alias: str
    asked_by: str | None
    """As `Actor.author` formats it."""


def list_wanted_aliases(session: TenantSession, version_id: str) -> list[WantedAlias]:
    """Each alias that the pushes of this version asked for."""
    return [
        WantedAlias(upload.adapter_name, alias, upload.created_by)
        for upload in repository.list_uploads_of_version(session, version_id)
        for alias in upload.aliases
    ]


def _declares_the_same(upload: Upload, new: NewUpload) -> bool:
    declared = (upload.adapter_name, upload.config_json, upload.size_bytes, tuple(upload.aliases))
    return declared == (new.adapter_name, new.config_json, new.size_bytes, new.aliases)


def _advance(session: TenantSession, upload_id: str, target: UploadState) -> Upload:
    upload = get_upload(session, upload_id)
    _change_state(upload, target)
    return upload


def _change_state(upload: Upload, target: UploadState) -> None:
    check_upload_transition(upload.state, target)
    upload.state = target
    upload.updated_at = utc_now()
    if target not in UNFINISHED_UPLOAD_STATES and upload.is_in_store:
        upload.parts = []  # nothing needs the objects any more
    if target in CLOSED_IN_VAIN_STATES:
        upload.config_json = "{}"  # up to 1 MiB that is no longer needed


def _conflict(upload: Upload) -> UploadConflict:
    return UploadConflict(received_bytes=upload.received_bytes, size_bytes=upload.size_bytes)


def _check_size(size_bytes: int) -> int:
    if size_bytes < 1:
        raise InvalidValue("An upload must have at least one byte.", param="size_bytes")
    return size_bytes


def _check_sha256(text: str) -> str:
    if len(text) != SHA256_HEX_LENGTH or not _HEX_DIGITS.issuperset(text):
        raise InvalidValue("A SHA-256 must be 64 lower-case hexadecimal digits.", param="sha256")
    return text
