"""The database records of uploads and of the versions that they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ...adapters.examination import IntakeReport
from ...platform.adapters import repository, service, uploads
from ...platform.adapters.lookup import lock_catalog
from ...platform.adapters.models import AdapterVersion, Upload
from ...platform.adapters.service import NewVersion
from ...platform.adapters.states import (
    UNFINISHED_UPLOAD_STATES,
    UploadState,
    VersionState,
)
from ...platform.adapters.upload_part import UploadPart
from ...platform.adapters.uploads import NewUpload
from ...platform.audit.event import Changed, Event, Origin
from ...platform.errors import UploadElsewhere
from ...platform.servers import service as servers
from ...platform.sessions import TenantSession
from ..contract.errors import ApiError
from ..control_plane.control_plane import ControlPlane


class UploadRecords:
    """Each change is one transaction, with its audit entry if it has one.

    All methods raise a PlatformError: UploadNotFound for another tenant's upload, InvalidTransition
    for a change that its state does not allow.
    """

    def __init__(self, control_plane: ControlPlane, server_id: str) -> None:
        self._control_plane = control_plane
        self._server_id = server_id

    async def get(self, tenant_id: str, upload_id: str) -> Upload:
        """The state of the upload."""
        return await self._control_plane.read(
            tenant_id, lambda session: uploads.get_upload(session, upload_id)
        )

    async def get_here(self, tenant_id: str, upload_id: str) -> Upload:
        """The state of the upload. Raises UploadElsewhere if its bytes are on another server."""
        upload = await self.get(tenant_id, upload_id)
        is_open = upload.state in UNFINISHED_UPLOAD_STATES
        if is_open and not upload.is_in_store and not self.is_here(upload):
            raise UploadElsewhere
        return upload

    async def get_version(self, upload: Upload) -> AdapterVersion:
        """The version of the upload. Raises ApiError with the reason if it was rejected."""
        if upload.version_id is None:
            reason = upload.reason_code or "upload_not_found"
            raise ApiError(reason, upload.reason_message)
        version_id = upload.version_id
        version = await self._control_plane.read(
            upload.tenant_id, lambda session: repository.find_version(session, version_id)
        )
        assert version is not None, "versions' rows stay"
        return version

    async def list_validating_here(self) -> Sequence[Upload]:
        """The uploads of all tenants that this server was examining when it stopped."""
        unfinished = await self._control_plane.read_all_tenants(
            repository.list_unfinished_uploads_of_all_tenants
        )
        return [
            upload
            for upload in unfinished
            if upload.state is UploadState.VALIDATING and self.is_here(upload)
        ]

    async def find_known_version(
        self, tenant_id: str, new: NewUpload, *, base_id: str
    ) -> AdapterVersion | None:
        """The adapter's live version with these bytes."""
        return await self._control_plane.read(
            tenant_id, lambda session: uploads.find_known_content(session, new, base_id=base_id)
        )

    async def acknowledge(
        self, upload: Upload, num_bytes: int, part: UploadPart | None = None
    ) -> Upload:
        """This many more bytes are on the disk, or in the store as `part`."""
        return await self._control_plane.write(
            upload.tenant_id,
            lambda session: uploads.advance_upload(
                session, upload.id, offset=upload.received_bytes, num_bytes=num_bytes, part=part
            ),
        )

    async def begin_validation(self, upload: Upload) -> Upload:
        """All bytes are received, and this server examines them. Raises UploadConflict if some are
        missing."""
        return await self._control_plane.write(
            upload.tenant_id,
            lambda session: uploads.begin_validation(session, upload.id, server_id=self._server_id),
        )

    async def take_over(self, upload: Upload) -> bool:
        """Whether this server examines the upload from now on, because the server that did is
        gone."""
        gone_id = upload.server_id
        if await self._control_plane.read_all_tenants(
            lambda session: servers.is_alive(session, gone_id)
        ):
            return False
        return await self._control_plane.write(
            upload.tenant_id,
            lambda session: uploads.take_over(
                session, upload.id, gone_id=gone_id, server_id=self._server_id
            ),
        )

    async def reopen(self, upload: Upload) -> None:
        """The server failed, not the upload: it may be committed again."""
        await self._control_plane.write(
            upload.tenant_id,
            lambda session: uploads.reopen(session, upload.id, server_id=self._server_id),
        )

    async def refuse(self, upload: Upload, *, reason: str, message: str) -> None:
        """The upload is rejected or lost."""
        await self._control_plane.write(
            upload.tenant_id,
            lambda session: uploads.mark_refused(
                session, upload.id, reason=reason, message=message
            ),
        )

    async def abandon(self, tenant_id: str, upload_id: str, origin: Origin) -> Upload:
        """The owner abandons the upload. Idempotent."""
        return await self._control_plane.change(
            tenant_id, origin, lambda session: _abandon(session, upload_id)
        )

    async def add_version(self, upload: Upload, report: IntakeReport, origin: Origin) -> str:
        """Register the examined adapter as a version; returns its id. Idempotent until the upload
        is accepted. Raises QuotaExceeded."""
        return await self._control_plane.change(
            upload.tenant_id, origin, lambda session: _add_version(session, upload, report)
        )

    async def accept(self, upload: Upload, version_id: str, origin: Origin) -> AdapterVersion:
        """The upload became this version, whose block is in the store."""
        return await self._control_plane.change(
            upload.tenant_id, origin, lambda session: _accept(session, upload, version_id)
        )

    def is_here(self, upload: Upload) -> bool:
        """Whether this server opened or examines it."""
        return upload.server_id == self._server_id


def set_wanted_aliases(
    session: TenantSession, upload: Upload, version: AdapterVersion
) -> Event | None:
    """Set the aliases that the upload requested if its version is ready; otherwise its attestation
    sets them. Those whose gates it has not passed stay where they are."""
    if version.state is not VersionState.READY or not upload.aliases:
        return None
    closed = service.set_free_aliases(
        session,
        upload.adapter_name,
        upload.aliases,
        version.number,
        changed_by=upload.created_by,
    )
    resource = f"{upload.adapter_name}@{version.number}"
    is_set = [alias for alias in upload.aliases if alias not in closed]
    return Event("version.alias", resource, {"aliases": is_set})


def _abandon(session: TenantSession, upload_id: str) -> Changed[Upload]:
    upload = uploads.get_upload(session, upload_id)
    if upload.state is UploadState.ABANDONED:
        return Changed(upload, None)
    event = Event("upload.abandon", upload.id, {"adapter": upload.adapter_name})
    return Changed(uploads.abandon_upload(session, upload_id), event)


def _add_version(session: TenantSession, upload: Upload, report: IntakeReport) -> Changed[str]:
    version, is_new = service.create_version(
        session,
        NewVersion(
            adapter_name=upload.adapter_name,
            digest=report.digest,
            base_id=report.base_id,
            object_sha256=report.file_sha256,
            size_bytes=report.size_bytes,
            intake_report=asdict(report),
            created_by=upload.created_by,
        ),
    )
    service.note_stored(session, report.digest, report.file_sha256, report.size_bytes)
    uploads.check_acceptable(session, upload.id)
    if not is_new:
        return Changed(version.id, None)
    details = {"digest": version.digest, "upload": upload.id, "pushed_by": upload.created_by}
    event = Event("version.create", f"{upload.adapter_name}@{version.number}", details)
    return Changed(version.id, event)


def _accept(session: TenantSession, upload: Upload, version_id: str) -> Changed[AdapterVersion]:
    lock_catalog(session)  # its attestation sets the aliases either before or after this
    version = repository.find_version(session, version_id)
    assert version is not None, "versions' rows stay"
    uploads.mark_accepted(session, upload.id, version_id)
    return Changed(version, set_wanted_aliases(session, upload, version))
