"""Pushes: adapters are received, examined, stored, and registered as versions.

An acknowledged byte is on the disk, or in the store if several servers share it. An acknowledged
version is in the store and in the database. `recover` continues what a crash interrupted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import structlog

from ...adapters.added_tokens import AddedToken
from ...adapters.errors import AdapterError, AdapterRejected, StorageFull
from ...adapters.examination import IntakeReport
from ...adapters.failpoints import failpoint
from ...adapters.identity import AdapterKey
from ...adapters.intake import IntakeLimits
from ...adapters.store import ObjectStore
from ...engine.messages import EngineInfo
from ...platform.adapters import uploads
from ...platform.adapters.models import AdapterVersion, Upload
from ...platform.adapters.states import UNFINISHED_UPLOAD_STATES, UploadState, VersionState
from ...platform.adapters.uploads import NewUpload
from ...platform.audit.event import BY_SYSTEM, Changed, Origin
from ...platform.errors import InvalidTransition, QuotaExceeded
from ...platform.keys.principal import Principal
from ...platform.quotas import service as quotas
from ...platform.quotas.service import Resource
from ...platform.sessions import TenantSession
from ..contract.errors import ApiError
from ..control_plane.control_plane import ControlPlane
from .attestation import Attestations
from .examiner import Examiner
from .staging import Staging
from .staging_budget import Hold
from .stored_blocks import StoredBlocks
from .upload_parts import UploadParts
from .upload_receiver import UploadReceiver, upload_hold
from .upload_records import UploadRecords, set_wanted_aliases
from .upload_room import UploadRoom

log = structlog.get_logger(__name__)

ELSEWHERE_SECONDS = 0.5
"""How often a commit looks whether another server has finished."""


class Pushed(NamedTuple):
    """The result of an upload."""

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
        open_tokenizer: Callable[[Sequence[AddedToken]], object],
        is_store_here: bool = True,
        note_stored: Callable[[AdapterKey], None],
    ) -> None:
        """`max_full_matrix_bytes`, `open_tokenizer`: see `Examiner`.
        `is_store_here`: the store is on the disk of the uploads. `note_stored` is called with each
        adapter whose block was stored or restored."""
        self._base_id = info.base_id
        self._staging = staging
        self._room = room
        self.is_store_here = is_store_here
        self._control_plane = control_plane
        self._attestations = attestations
        self._served_model_name = served_model_name
        self.server_id = server_id
        """The files of the uploads."""
        self._note_stored = note_stored
        self._records = UploadRecords(control_plane, server_id)
        self._parts = UploadParts(store=store, staging=staging)
        self._receiver = UploadReceiver(
            staging=staging, room=room, records=self._records, parts=self._parts
        )
        self._examiner = Examiner(
            info=info,
            layout_path=layout_path,
            staging=staging,
            room=room,
            max_full_matrix_bytes=max_full_matrix_bytes,
            open_tokenizer=open_tokenizer,
        )
        self._blocks = StoredBlocks(store=store, staging=staging, budget=room.budget)
        self._validations: dict[str, asyncio.Task[Pushed]] = {}
        """The running validations, by upload id."""

    async def open(
        self,
        principal: Principal,
        new: NewUpload,
        origin: Origin,
        *,
        declared_base_id: str | None,
    ) -> Upload:
        """Declare an upload; repeating the declaration returns the unfinished upload.

        If the adapter has a live version with these bytes and the store has its block undamaged,
        the upload is accepted without the bytes. Otherwise the bytes are sent and the block is
        written again. Raises ApiError for another base or a reserved name, InvalidValue,
        DiskShareExceeded, and an AdapterError: AdapterRejected if it is too large, StorageFull, or
        an error of the store.
        """
        self._check_declaration(principal, new, declared_base_id)
        try:
            upload = await self._open(principal.tenant_id, new, origin)
        except StorageFull:
            wanted = Hold("", principal.tenant_id, new.num_bytes)
            if not await self._room.make(lambda: self._room.budget.lacking_bytes(wanted)):
                raise
            upload = await self._open(principal.tenant_id, new, origin)
        failpoint("uploads.opened")
        return upload

    async def get(self, tenant_id: str, upload_id: str) -> Upload:
        """The state of the upload. Raises UploadNotFound."""
        return await self._records.get(tenant_id, upload_id)

    async def receive(
        self,
        tenant_id: str,
        upload_id: str,
        *,
        offset: int,
        read: Callable[[int], AsyncIterator[bytes]],
        num_bytes: int | None = None,
    ) -> Upload:
        """Receive the bytes that `read` yields, from `offset` on; `read` is called with the maximum
        to expect.

        All received bytes are acknowledged, even if the rest is missing. `num_bytes`: the announced
        number, if any; too many are refused before any is read. Raises UploadConflict if the offset
        is wrong or another request writes to the upload, UploadElsewhere, ApiError and StorageFull.
        """
        return await self._receiver.receive(
            tenant_id, upload_id, offset=offset, read=read, num_bytes=num_bytes
        )

    async def commit(self, tenant_id: str, upload_id: str, origin: Origin) -> Pushed:
        """Examine and store the received adapter; returns its version. Idempotent.

        It continues if the caller disconnects. If another server examines the upload, its result is
        awaited; if that server is gone, this one takes over. Raises ApiError with the reason if the
        adapter is rejected, UploadConflict if bytes are missing, UploadElsewhere, and an
        AdapterError if this server failed: the bytes are kept, and the upload may be committed
        again.
        """
        while True:
            upload = await self._records.get_here(tenant_id, upload_id)
            if upload.state is UploadState.RECEIVING:
                upload = await self._begin_validation(upload)
                failpoint("pushes.validating")
            if upload.state not in UNFINISHED_UPLOAD_STATES:
                return await self._outcome(upload)
            if upload.state is UploadState.VALIDATING and self._records.is_here(upload):
                return await asyncio.shield(self._validation(upload, origin))
            if not await self._records.take_over(upload):
                await asyncio.sleep(ELSEWHERE_SECONDS)

    async def abandon(self, tenant_id: str, upload_id: str, origin: Origin) -> Upload:
        """Abandon the upload; its bytes are deleted when this returns. Idempotent.

        Raises UploadNotFound, or InvalidTransition if it has ended otherwise or is being examined.
        """
        parts = (await self.get(tenant_id, upload_id)).stored_parts
        upload = await self._records.abandon(tenant_id, upload_id, origin)
        self._room.release(upload_id)
        await self._parts.discard(upload, parts)
        return upload

    async def recover(self) -> None:
        """Restart the examinations that were running when the server stopped."""
        await self._room.refresh()
        for upload in await self._records.list_validating_here():
            self._validation(upload, BY_SYSTEM)

    async def close(self) -> None:
        """Wait for running examinations."""
        await asyncio.gather(*self._validations.values(), return_exceptions=True)
        self._examiner.close()
        self._blocks.close()
        self._parts.close()
        await self._room.close()
        self._staging.close()

    # --- opening ----------------------------------------------------------------------------------

    def _check_declaration(
        self, principal: Principal, new: NewUpload, declared_base_id: str | None
    ) -> None:
        """Raise ApiError or AdapterRejected for a declaration that is never accepted."""
        if declared_base_id not in (None, self._base_id):
            raise ApiError("base_mismatch", param="base_id")
        full_name = f"{principal.tenant_slug}/{new.adapter_name}"
        if self._served_model_name in (new.adapter_name, full_name):
            raise ApiError("invalid_parameter", "The base model has this name.", param="name")
        most = min(IntakeLimits().max_file_bytes, self._room.budget.max_upload_bytes)
        if new.num_bytes > most:
            raise AdapterRejected(
                "file_too_large", f"the adapter has {new.num_bytes} bytes; the most is {most}"
            )

    async def _open(self, tenant_id: str, new: NewUpload, origin: Origin) -> Upload:
        known = await self._find_whole_version(tenant_id, new)
        held: list[str] = []
        try:
            return await self._control_plane.change(
                tenant_id, origin, lambda session: self._accept_or_hold(session, new, known, held)
            )
        except Exception:  # whatever failed, the database has rolled back
            for upload_id in held:
                self._room.budget.release(upload_id)
            raise

    async def _find_whole_version(self, tenant_id: str, new: NewUpload) -> AdapterVersion | None:
        """The live version with these bytes, if the store has its block undamaged."""
        version = await self._records.find_known_version(tenant_id, new, base_id=self._base_id)
        if version is None or not await self._blocks.has_whole(version):
            return None
        return version

    def _accept_or_hold(
        self,
        session: TenantSession,
        new: NewUpload,
        known: AdapterVersion | None,
        held: list[str],
    ) -> Changed[Upload]:
        """`known` is the live version with these bytes and an undamaged block, if any. `held`
        receives the id of the upload for which room was reserved."""
        accepted = uploads.accept_known_content(session, new, known.id) if known else None
        if accepted is not None:
            version, upload = accepted
            return Changed(upload, set_wanted_aliases(session, upload, version))
        upload = uploads.open_or_resume_upload(session, new)
        if not self._room.budget.is_held(upload.id):
            stored = quotas.count(session, Resource.STORED_BYTES) if self.is_store_here else 0
            hold = Hold(upload.id, upload.tenant_id, new.num_bytes)
            self._room.budget.hold(hold, stored_bytes=stored)
            held.append(upload.id)
        return Changed(upload, None)

    # --- validating -------------------------------------------------------------------------------

    async def _begin_validation(self, upload: Upload) -> Upload:
        """The upload in validation, begun here or, by another request meanwhile, elsewhere."""
        try:
            return await self._records.begin_validation(upload)
        except InvalidTransition:
            return await self.get(upload.tenant_id, upload.id)

    def _validation(self, upload: Upload, origin: Origin) -> asyncio.Task[Pushed]:
        """The validation of this upload, started if none runs."""
        task = self._validations.get(upload.id)
        if task is None:
            # Later commits join the validation, so the first one's idempotency key cannot stop it.
            task = asyncio.create_task(self._validate(upload, replace(origin, guard=None)))
            self._validations[upload.id] = task
            task.add_done_callback(lambda done: self._validation_ended(upload, done))
        return task

    def _validation_ended(self, upload: Upload, task: asyncio.Task[Pushed]) -> None:
        del self._validations[upload.id]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ApiError):
            log.error("examination_failed", upload_id=upload.id, exc_info=error)

    async def _validate(self, upload: Upload, origin: Origin) -> Pushed:
        upload = await self.get(upload.tenant_id, upload.id)
        if upload.state is not UploadState.VALIDATING:
            return await self._outcome(upload)  # another validation has ended meanwhile
        try:
            version = await self._make_version(upload, origin)
        except InvalidTransition:  # closed as lost meanwhile, because this server was stopped
            self._room.release(upload.id)
            return await self._outcome(await self.get(upload.tenant_id, upload.id))
        await self._release(upload)
        if version.state is VersionState.VALIDATED:
            self._attestations.add(version)
        return Pushed(upload.adapter_name, version.number)

    async def _make_version(self, upload: Upload, origin: Origin) -> AdapterVersion:
        """Raises ApiError if the upload is rejected. After another error, the upload waits for a
        commit."""
        try:
            if upload.is_in_store:
                await self._room.prepare(upload_hold(upload), upload.size_bytes)
                await self._parts.assemble(upload)
            report = await self._examiner.examine(upload)
            failpoint("pushes.examined")
            version = await self._publish(upload, report, origin)
        except AdapterRejected as exc:
            _log_notes(upload, exc)
            raise await self._refuse(upload, exc.reason, str(exc), exc.pointer) from exc
        except AdapterError as exc:
            _log_notes(upload, exc)
            self._discard_copies(upload)
            await self._records.reopen(upload)
            raise
        except QuotaExceeded as exc:
            raise await self._refuse(upload, exc.code, str(exc)) from exc
        failpoint("pushes.accepted")
        return version

    async def _publish(
        self, upload: Upload, report: IntakeReport, origin: Origin
    ) -> AdapterVersion:
        """Store the block, register the version, then accept the upload.

        Until then, the upload is examined again after a failure or a restart. That repeats all
        three steps and finds the version registered.
        """
        await self._blocks.put(upload, report)
        failpoint("pushes.stored")
        version_id = await self._records.add_version(upload, report, origin)
        failpoint("pushes.created")
        # A deletion of the same content may have ended in between; from here on none removes it.
        await self._blocks.put_if_missing(upload, report)
        self._note_stored(AdapterKey(upload.tenant_id, report.digest))
        version = await self._records.accept(upload, version_id, origin)
        log.info(
            "adapter_accepted",
            tenant_id=upload.tenant_id,
            adapter_digest=report.digest,
            version=version.number,
        )
        return version

    async def _refuse(
        self, upload: Upload, reason: str, message: str, pointer: str | None = None
    ) -> ApiError:
        """Record the rejection of the upload; returns the error for its owner."""
        await self._records.refuse(upload, reason=reason, message=message)
        await self._release(upload)
        log.info(
            "adapter_rejected",
            tenant_id=upload.tenant_id,
            adapter=upload.adapter_name,
            reason=reason,
        )
        return ApiError(reason, message, param=pointer)

    async def _release(self, upload: Upload) -> None:
        """Delete the bytes of an upload that has ended here."""
        self._room.release(upload.id)
        await self._parts.discard(upload, upload.stored_parts)

    def _discard_copies(self, upload: Upload) -> None:
        """Delete what the next examination makes anew."""
        if upload.is_in_store:
            self._staging.discard(upload.id)
        else:
            self._staging.discard_block(upload.id)

    async def _outcome(self, upload: Upload) -> Pushed:
        version = await self._records.get_version(upload)
        return Pushed(upload.adapter_name, version.number)


def _log_notes(upload: Upload, error: AdapterError) -> None:
    """The output of the examining process at its end, for the operator, not for the tenant."""
    for note in getattr(error, "__notes__", ()):
        log.warning("examination_failed", upload_id=upload.id, code=error.code, note=note)
