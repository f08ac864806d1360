"""Adapters on their way in: received, examined, stored, and made a version.

An acknowledged byte is on the disk, an acknowledged version in the store and in the database.
What a crash interrupts is taken up again by `recover`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import structlog

from ...adapters.disk_room import full_disk_told
from ...adapters.errors import (
    AdapterError,
    AdapterRejected,
    ObjectCorrupt,
    ObjectNotFound,
    StorageFull,
)
from ...adapters.examination import IntakeReport
from ...adapters.failpoints import failpoint
from ...adapters.fetcher import TRANSFER_SECONDS
from ...adapters.identity import AdapterKey
from ...adapters.intake import IntakeLimits, IntakeRequest, run_intake
from ...adapters.store import ObjectStore, object_key
from ...engine.messages import EngineInfo
from ...platform.adapters import repository, service, uploads
from ...platform.adapters.models import AdapterVersion, Upload
from ...platform.adapters.service import NewVersion
from ...platform.adapters.states import UploadState, VersionState
from ...platform.adapters.uploads import NewUpload
from ...platform.audit.event import BY_SYSTEM, Changed, Event, Origin
from ...platform.base import new_id
from ...platform.errors import (
    InvalidTransition,
    QuotaExceeded,
    UploadConflict,
    UploadElsewhere,
    UploadNotFound,
)
from ...platform.keys.principal import Principal
from ...platform.quotas import service as quotas
from ...platform.quotas.service import Resource
from ...platform.sessions import TenantSession
from ..contract.errors import ApiError
from ..control_plane.control_plane import ControlPlane
from ..control_plane.tenant_turns import TenantTurns
from .attestation import Attestations
from .staging import Staging
from .staging_budget import EXAMINATION_COPIES, Hold
from .upload_room import UploadRoom

log = structlog.get_logger(__name__)

UNDECLARED_BYTES = 1 << 20
"""Room that a body of unknown length needs before it is read."""
NUM_EXAMINERS = 1 + max(1, min(2, (os.cpu_count() or 1) // 2))
"""Intake processes at a time; all but one may be of one tenant."""
NUM_STORE_CALLS = 4

_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "float32": 4, "float16": 2, "bfloat16": 2}


class Pushed(NamedTuple):
    """What an upload became."""

    adapter_name: str
    version: int


class Pushes:
    """Turns uploads into versions; one for the server."""

    def __init__(
        self,
        *,
        info: EngineInfo,
        layout_path: Path,
        staging: Staging,
        room: UploadRoom,
        store: ObjectStore,
        control_plane: ControlPlane,
        attestations: Attestations,
        served_model_name: str,
        server_id: str,
        max_full_matrix_bytes: int = 0,
        is_store_here: bool = True,
        note_stored: Callable[[AdapterKey], None],
    ) -> None:
        """`max_full_matrix_bytes`: what whole matrices of one adapter may take together;
        `is_store_here`: adapters are stored on the disk that uploads lie on; `note_stored` is told
        whose block the store has, perhaps anew.
        """
        self._info = info
        self._layout_path = layout_path
        self._staging = staging
        self._room = room
        self._is_store_here = is_store_here
        self._store = store
        self._control_plane = control_plane
        self._attestations = attestations
        self._served_model_name = served_model_name
        self.server_id = server_id
        """Where the bytes of pushes lie."""
        self._max_full_matrix_bytes = max_full_matrix_bytes
        self._note_stored = note_stored
        self._examiners = TenantTurns("intake", NUM_EXAMINERS)
        self._store_calls = TenantTurns("store-calls", NUM_STORE_CALLS)
        self._receiving: set[tuple[str, str]] = set()
        self._examinations: dict[str, asyncio.Task[Pushed]] = {}

    async def open(
        self,
        principal: Principal,
        new: NewUpload,
        origin: Origin,
        *,
        declared_base_id: str | None,
    ) -> Upload:
        """Expect an adapter; the same declaration again finds its unfinished upload.

        It is accepted at once if the adapter has these bytes as a live version already, and the
        store its block undamaged; else the bytes are sent and the block is written anew. Raises
        ApiError for another base or a reserved name, InvalidValue, DiskShareExceeded, and an
        AdapterError: AdapterRejected for what is too large to be taken, StorageFull, or that the
        store does not answer.
        """
        if declared_base_id not in (None, self._info.base_id):
            raise ApiError("base_mismatch", param="base_id")
        full_name = f"{principal.tenant_slug}/{new.adapter_name}"
        if self._served_model_name in (new.adapter_name, full_name):
            raise ApiError("invalid_parameter", "The base model has this name.", param="name")
        self._check_size(new)
        try:
            upload = await self._open_in_room(principal.tenant_id, new, origin)
        except StorageFull:
            wanted = Hold("", principal.tenant_id, new.num_bytes)
            if not await self._make_room(lambda: self._room.budget.lacking_bytes(wanted)):
                raise
            upload = await self._open_in_room(principal.tenant_id, new, origin)
        failpoint("uploads.opened")
        return upload

    async def get(self, tenant_id: str, upload_id: str) -> Upload:
        """Where the upload stands. Raises UploadNotFound."""
        return await self._control_plane.read(
            tenant_id, lambda session: uploads.get_upload(session, upload_id)
        )

    async def receive(
        self,
        tenant_id: str,
        upload_id: str,
        *,
        offset: int,
        read: Callable[[int], AsyncIterator[bytes]],
        num_bytes: int | None = None,
    ) -> Upload:
        """Take the bytes that `read` yields, from `offset` on; `read` is told the most to expect.

        All that arrived are acknowledged, even if the rest did not. `num_bytes`: how many are
        announced, if they are; too many are refused before one is read.

        Raises UploadConflict if the upload stands elsewhere or another request writes to it,
        UploadElsewhere, ApiError and StorageFull.
        """
        claim = (tenant_id, upload_id)
        if claim in self._receiving:
            raise _conflict(await self.get(tenant_id, upload_id), is_busy=True)
        # Before looking where it stands: what was read earlier is old once another has written.
        self._receiving.add(claim)
        try:
            upload = await self._get_own(tenant_id, upload_id)
            if upload.state is not UploadState.RECEIVING or offset != upload.received_bytes:
                raise _conflict(upload)
            max_bytes = upload.size_bytes - offset
            await self._prepare_to_receive(upload, num_bytes, max_bytes)
            chunks = self._until_given_up(upload_id, read(max_bytes))
            try:
                await self._staging.append(tenant_id, upload_id, offset, chunks)
            finally:
                failpoint("uploads.written")
                if not self._room.budget.is_held(upload_id):  # it was given up meanwhile
                    self._staging.discard(upload_id)
                upload = await self._acknowledge(tenant_id, upload_id, offset)
        finally:
            self._receiving.discard(claim)
        failpoint("uploads.acknowledged")
        return upload

    async def commit(self, tenant_id: str, upload_id: str, origin: Origin) -> Pushed:
        """Examine and store what was received; the version it became. Idempotent.

        It goes on if the caller goes away. Raises ApiError with the reason if it is refused,
        UploadConflict if bytes are missing, UploadElsewhere, and an AdapterError if this server
        failed: the bytes are kept, and may be committed again.
        """
        upload = await self._get_own(tenant_id, upload_id)
        if upload.state is UploadState.RECEIVING:
            upload = await self._control_plane.write(
                tenant_id, lambda session: uploads.begin_validation(session, upload_id)
            )
            failpoint("pushes.validating")
        if upload.state is UploadState.VALIDATING:
            return await asyncio.shield(self._examination(upload, origin))
        return await self._outcome(upload)

    async def abandon(self, tenant_id: str, upload_id: str, origin: Origin) -> Upload:
        """Expect nothing more of the upload; its bytes are gone when this returns. Idempotent.

        Raises UploadNotFound, or InvalidTransition if it has ended otherwise or is being examined.
        """
        upload = await self._control_plane.change(
            tenant_id, origin, lambda session: _abandon(session, upload_id)
        )
        self._room.release(upload_id)
        return upload

    async def recover(self) -> None:
        """Examine again what was being examined when the server stopped."""
        await self._room.refresh()
        unfinished = await self._control_plane.read_all_tenants(
            repository.list_unfinished_uploads_of_all_tenants
        )
        for upload in unfinished:
            if upload.state is UploadState.VALIDATING and self._is_own(upload):
                self._examination(upload, BY_SYSTEM)

    async def close(self) -> None:
        """Let the examinations under way end."""
        await asyncio.gather(*self._examinations.values(), return_exceptions=True)
        self._examiners.close()
        self._store_calls.close()
        await self._room.close()
        self._staging.close()

    # --- inside -----------------------------------------------------------------------------------

    async def _get_own(self, tenant_id: str, upload_id: str) -> Upload:
        upload = await self.get(tenant_id, upload_id)
        is_open = upload.state in (UploadState.RECEIVING, UploadState.VALIDATING)
        if is_open and not self._is_own(upload):
            raise UploadElsewhere
        return upload

    def _is_own(self, upload: Upload) -> bool:
        """The bytes lie here, not with another server."""
        return upload.server_id == self.server_id

    def _check_size(self, new: NewUpload) -> None:
        """Raise AdapterRejected for more than is taken at all, whatever else lies here."""
        most = min(IntakeLimits().max_file_bytes, self._room.budget.max_upload_bytes)
        if new.num_bytes > most:
            raise AdapterRejected(
                "file_too_large", f"the adapter has {new.num_bytes} bytes; the most is {most}"
            )

    async def _make_room(self, lacking_bytes: Callable[[], int]) -> bool:
        receiving = {upload_id for _, upload_id in self._receiving}
        return await self._room.make(lacking_bytes, keep=receiving)

    async def _open_in_room(self, tenant_id: str, new: NewUpload, origin: Origin) -> Upload:
        known = await self._find_whole_version(tenant_id, new)
        held: list[str] = []
        try:
            return await self._control_plane.change(
                tenant_id, origin, lambda session: self._open(session, new, known, held)
            )
        except Exception:
            for upload_id in held:  # the database does not know it
                self._room.budget.release(upload_id)
            raise

    async def _prepare_to_receive(
        self, upload: Upload, num_bytes: int | None, max_bytes: int
    ) -> None:
        """Raise ApiError or StorageFull for what could not be taken to its end."""
        if num_bytes is not None and num_bytes > max_bytes:
            raise ApiError(
                "body_too_large",
                f"The upload needs {max_bytes} more bytes, but {num_bytes} were sent.",
            )
        budget = self._room.budget
        budget.restore([Hold(upload.id, upload.tenant_id, _num_bytes(upload))])
        piece = min(max_bytes, UNDECLARED_BYTES) if num_bytes is None else num_bytes
        if budget.lacking_to_receive(piece) and not await self._make_room(
            lambda: budget.lacking_to_receive(piece)
        ):
            raise StorageFull

    async def _until_given_up(
        self, upload_id: str, chunks: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        async for chunk in chunks:
            if not self._room.budget.is_held(upload_id):
                raise UploadNotFound
            yield chunk

    def _open(
        self,
        session: TenantSession,
        new: NewUpload,
        known: AdapterVersion | None,
        held: list[str],
    ) -> Changed[Upload]:
        """`known` is the version that has these bytes already, and a whole block.

        `held` gets the upload that room was kept for now.
        """
        accepted = uploads.accept_known_content(session, new, known.id) if known else None
        if accepted is not None:
            version, upload = accepted
            return Changed(upload, _set_aliases(session, upload, version))
        upload = uploads.open_or_resume_upload(session, new)
        if not self._room.budget.is_held(upload.id):
            stored = quotas.count(session, Resource.STORED_BYTES) if self._is_store_here else 0
            hold = Hold(upload.id, upload.tenant_id, new.num_bytes)
            self._room.budget.hold(hold, stored_bytes=stored)
            held.append(upload.id)
        return Changed(upload, None)

    async def _acknowledge(self, tenant_id: str, upload_id: str, offset: int) -> Upload:
        num_bytes = self._staging.num_bytes(upload_id) - offset
        return await self._control_plane.write(
            tenant_id,
            lambda session: uploads.advance_upload(
                session, upload_id, offset=offset, num_bytes=num_bytes
            ),
        )

    def _examination(self, upload: Upload, origin: Origin) -> asyncio.Task[Pushed]:
        """The one examination of this upload, begun if it is not under way."""
        task = self._examinations.get(upload.id)
        if task is None:
            task = asyncio.create_task(self._examine_and_store(upload, origin))
            self._examinations[upload.id] = task
            task.add_done_callback(lambda done: self._examination_ended(upload, done))
        return task

    def _examination_ended(self, upload: Upload, task: asyncio.Task[Pushed]) -> None:
        del self._examinations[upload.id]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ApiError):
            log.error("examination_failed", upload_id=upload.id, exc_info=error)

    async def _examine_and_store(self, upload: Upload, origin: Origin) -> Pushed:
        upload = await self.get(upload.tenant_id, upload.id)
        if upload.state is not UploadState.VALIDATING:
            return await self._outcome(upload)  # another examination has ended meanwhile
        try:
            return await self._make_version(upload, origin)
        except InvalidTransition:  # given up for lost meanwhile: this server was away
            self._room.release(upload.id)
            return await self._outcome(await self.get(upload.tenant_id, upload.id))

    async def _make_version(self, upload: Upload, origin: Origin) -> Pushed:
        try:
            report = await self._examine_in_room(upload)
            failpoint("pushes.examined")
            version = await self._accept(upload, report, origin)
        except AdapterRejected as exc:
            _log_notes(upload, exc)
            raise await self._refuse(upload, exc.reason, str(exc), exc.pointer) from exc
        except AdapterError as exc:
            _log_notes(upload, exc)
            await self._reopen(upload)
            raise
        except QuotaExceeded as exc:
            raise await self._refuse(upload, exc.code, str(exc)) from exc
        failpoint("pushes.accepted")
        self._room.release(upload.id)
        if version.state is VersionState.VALIDATED:
            self._attestations.add(version)
        return Pushed(upload.adapter_name, version.number)

    async def _reopen(self, upload: Upload) -> None:
        """The server failed, not the upload: it waits, whole, to be committed again."""
        self._staging.discard_block(upload.id)
        await self._control_plane.write(
            upload.tenant_id, lambda session: uploads.reopen(session, upload.id)
        )

    async def _refuse(
        self, upload: Upload, reason: str, message: str, pointer: str | None = None
    ) -> ApiError:
        """Write down that nothing comes of the upload; what to tell its owner."""
        await self._control_plane.write(
            upload.tenant_id,
            lambda session: uploads.mark_refused(
                session, upload.id, reason=reason, message=message
            ),
        )
        self._room.release(upload.id)
        log.info(
            "adapter_rejected",
            tenant_id=upload.tenant_id,
            adapter=upload.adapter_name,
            reason=reason,
        )
        return ApiError(reason, message, param=pointer)

    async def _examine_in_room(self, upload: Upload) -> IntakeReport:
        """Raises AdapterRejected or StorageFull."""
        needed = EXAMINATION_COPIES * upload.size_bytes
        try:
            return await self._examiners.run(upload.tenant_id, self._examine, upload)
        except StorageFull:
            self._staging.discard_block(upload.id)
            if not await self._make_room(lambda: self._room.budget.lacking_to_write(needed)):
                raise
            return await self._examiners.run(upload.tenant_id, self._examine, upload)

    def _examine(self, upload: Upload) -> IntakeReport:
        """In a thread. Raises AdapterRejected or StorageFull."""
        needed = EXAMINATION_COPIES * upload.size_bytes
        with self._room.budget.writing(needed) as room_bytes, full_disk_told():
            return self._run_intake(upload, room_bytes)

    def _run_intake(self, upload: Upload, room_bytes: int) -> IntakeReport:
        if self._staging.num_bytes(upload.id) != upload.size_bytes:
            raise AdapterRejected("intake_failed", "The received bytes were lost; push again.")
        if self._staging.sha256(upload.id) != upload.sha256:
            raise AdapterRejected("digest_mismatch", "The bytes do not have the declared SHA-256.")
        self._staging.config_path(upload.id).write_text(upload.config_json)
        self._staging.block_path(upload.id).unlink(missing_ok=True)
        report = run_intake(
            IntakeRequest(
                config_path=str(self._staging.config_path(upload.id)),
                weights_path=str(self._staging.weights_path(upload.id)),
                output_path=str(self._staging.block_path(upload.id)),
                layout_path=str(self._layout_path),
                serving_dtype=self._info.dtype,
                max_full_matrix_bytes=self._max_full_matrix_bytes,
                room_bytes=room_bytes,
            )
        )
        check_fits(report, self._info)
        return report

    async def _accept(self, upload: Upload, report: IntakeReport, origin: Origin) -> AdapterVersion:
        key = AdapterKey(upload.tenant_id, report.digest)
        await self._store_calls.run(key.tenant_id, self._put, key, upload.id, report)
        failpoint("pushes.stored")
        version = await self._control_plane.change(
            upload.tenant_id, origin, lambda session: _add_version(session, upload, report)
        )
        failpoint("pushes.created")
        # A deletion of the same content may have ended in between; from here on none removes it.
        await self._store_calls.run(key.tenant_id, self._put_if_missing, key, upload.id, report)
        self._note_stored(key)
        log.info(
            "adapter_accepted",
            tenant_id=upload.tenant_id,
            adapter_digest=report.digest,
            version=version.number,
        )
        return version

    def _put(self, key: AdapterKey, upload_id: str, report: IntakeReport) -> None:
        block = self._staging.block_path(upload_id)
        self._store.put_file(object_key(key), block, sha256=report.file_sha256)

    def _put_if_missing(self, key: AdapterKey, upload_id: str, report: IntakeReport) -> None:
        if not self._store.exists(object_key(key)):
            self._put(key, upload_id, report)

    async def _find_whole_version(self, tenant_id: str, new: NewUpload) -> AdapterVersion | None:
        """The live version that has these bytes, if the store has its block undamaged.

        Raises StorageFull, StoreUnavailable or StoreDenied.
        """
        version = await self._control_plane.read(
            tenant_id,
            lambda session: uploads.find_known_content(session, new, base_id=self._info.base_id),
        )
        if version is None:
            return None
        is_whole = await self._store_calls.run(tenant_id, self._is_whole, version)
        return version if is_whole else None

    def _is_whole(self, version: AdapterVersion) -> bool:
        key = AdapterKey(version.tenant_id, version.digest)
        path = self._staging.block_path(new_id())
        try:
            with self._room.budget.writing(version.size_bytes):
                self._store.fetch_file(
                    object_key(key),
                    path,
                    sha256=version.object_sha256,
                    size_bytes=version.size_bytes,
                    deadline=time.monotonic() + TRANSFER_SECONDS,
                )
        except (ObjectNotFound, ObjectCorrupt) as exc:
            log.warning("stored_block_lost", adapter_digest=key.digest, error=str(exc))
            return False
        finally:
            path.unlink(missing_ok=True)
        return True

    async def _outcome(self, upload: Upload) -> Pushed:
        if upload.version_id is None:
            reason = upload.reason_code or "upload_not_found"
            raise ApiError(reason, upload.reason_message)
        version_id = upload.version_id
        version = await self._control_plane.read(
            upload.tenant_id, lambda session: repository.find_version(session, version_id)
        )
        assert version is not None, "versions' rows stay"
        return Pushed(upload.adapter_name, version.number)


def _log_notes(upload: Upload, error: AdapterError) -> None:
    """What the examining process said about its end: for the operator, not for the tenant."""
    for note in getattr(error, "__notes__", ()):
        log.warning("examination_failed", upload_id=upload.id, code=error.code, note=note)


def _num_bytes(upload: Upload) -> int:
    return upload.size_bytes + len(upload.config_json)


def _abandon(session: TenantSession, upload_id: str) -> Changed[Upload]:
    upload = uploads.get_upload(session, upload_id)
    if upload.state is UploadState.ABANDONED:
        return Changed(upload, None)
    event = Event("upload.abandon", upload.id, {"adapter": upload.adapter_name})
    return Changed(uploads.abandon_upload(session, upload_id), event)


def _conflict(upload: Upload, *, is_busy: bool = False) -> UploadConflict:
    return UploadConflict(
        received_bytes=upload.received_bytes, size_bytes=upload.size_bytes, is_busy=is_busy
    )


def check_fits(report: IntakeReport, info: EngineInfo) -> None:
    """Raise AdapterRejected if the adapter exceeds the memory for all adapters.

    How much that is says the log: it is the machine's, and the answer is the tenant's.
    """
    room = min(info.arena_bytes, info.host_cache_bytes)
    needed = report.size_bytes * _ELEMENT_BYTES[info.dtype] // _ELEMENT_BYTES[report.dtype]
    if needed > room:
        log.info("adapter_too_large", adapter_digest=report.digest, needed=needed, room=room)
        raise AdapterRejected(
            "adapter_too_large",
            f"The adapter needs {needed} bytes, more than the memory reserved for adapters.",
        )


def _add_version(
    session: TenantSession, upload: Upload, report: IntakeReport
) -> Changed[AdapterVersion]:
    """The version of what was examined, with the upload's end in the same unit of work."""
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
    uploads.mark_accepted(session, upload.id, version.id)
    event = _set_aliases(session, upload, version)
    if is_new:
        details = {"digest": version.digest, "upload": upload.id, "pushed_by": upload.created_by}
        event = Event("version.create", f"{upload.adapter_name}@{version.number}", details)
    return Changed(version, event)


def _set_aliases(session: TenantSession, upload: Upload, version: AdapterVersion) -> Event | None:
    """Those that the upload asks for, if the version is ready; else its attestation sets them."""
    if version.state is not VersionState.READY or not upload.aliases:
        return None
    for alias in upload.aliases:
        service.set_alias(
            session, upload.adapter_name, alias, version.number, changed_by=upload.created_by
        )
    resource = f"{upload.adapter_name}@{version.number}"
    return Event("version.alias", resource, {"aliases": upload.aliases})
