"""Receives the bytes of uploads. Acknowledged bytes are on this server's disk, or in the store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from ...adapters.failpoints import failpoint
from ...platform.adapters.models import Upload
from ...platform.adapters.states import UploadState
from ...platform.errors import InvalidTransition, TooManyParts, UploadConflict, UploadNotFound
from ..contract.errors import ApiError
from .staging import Staging
from .staging_budget import Hold
from .upload_parts import UploadParts
from .upload_records import UploadRecords
from .upload_room import UploadRoom

UNDECLARED_BYTES = 1 << 20
"""The room required before reading a body of unknown length."""


class UploadReceiver:
    """Allows one request at a time to write to an upload."""

    def __init__(
        self, *, staging: Staging, room: UploadRoom, records: UploadRecords, parts: UploadParts
    ) -> None:
        self._staging = staging
        self._parts = parts
        self._room = room
        self._records = records
        self._receiving: set[tuple[str, str]] = set()
        """By tenant, so that no tenant delays the uploads of another."""

    async def receive(
        self,
        tenant_id: str,
        upload_id: str,
        *,
        offset: int,
        read: Callable[[int], AsyncIterator[bytes]],
        num_bytes: int | None,
    ) -> Upload:
        """Receive the bytes that `read` yields, from `offset` on; see `Pushes.receive`."""
        claim = (tenant_id, upload_id)
        if claim in self._receiving:
            raise _conflict(await self._records.get(tenant_id, upload_id), is_busy=True)
        # Before looking where it stands: what was read earlier is old once another has written.
        self._receiving.add(claim)
        try:
            upload = await self._records.get_here(tenant_id, upload_id)
            if upload.state is not UploadState.RECEIVING or offset != upload.received_bytes:
                raise _conflict(upload)
            with self._room.receiving(upload_id):
                return await self._receive_rest(upload, read, num_bytes)
        finally:
            self._receiving.discard(claim)

    async def _receive_rest(
        self, upload: Upload, read: Callable[[int], AsyncIterator[bytes]], num_bytes: int | None
    ) -> Upload:
        offset = upload.received_bytes
        max_bytes = upload.size_bytes - offset
        if num_bytes is None:
            num_bytes = min(max_bytes, UNDECLARED_BYTES)
        elif num_bytes > max_bytes:
            raise _too_large(num_bytes, max_bytes)
        await self._room.prepare(upload_hold(upload), num_bytes)
        chunks = self._until_given_up(upload.id, read(max_bytes))
        if upload.is_in_store:
            return await self._receive_part(upload, chunks)
        try:
            await self._staging.append(upload.tenant_id, upload.id, offset, chunks)
        finally:
            failpoint("uploads.written")
            if not self._room.budget.is_held(upload.id):  # it was given up meanwhile
                self._staging.discard(upload.id)
            num_received = self._staging.num_bytes(upload.id) - offset
            upload = await self._records.acknowledge(upload, num_received)
        failpoint("uploads.acknowledged")
        return upload

    async def _receive_part(self, upload: Upload, chunks: AsyncIterator[bytes]) -> Upload:
        try:
            await self._staging.write_part(upload.tenant_id, upload.id, chunks)
        finally:
            failpoint("uploads.written")
            try:
                upload = await self._keep_part(upload)
            finally:
                self._staging.part_path(upload.id).unlink(missing_ok=True)
        failpoint("uploads.acknowledged")
        return upload

    async def _keep_part(self, upload: Upload) -> Upload:
        """Store what was received, then acknowledge it: of several servers with bytes from the same
        offset, one succeeds."""
        part = await self._parts.put(upload)
        try:
            return await self._records.acknowledge(upload, part.size_bytes if part else 0, part)
        except (UploadConflict, InvalidTransition, UploadNotFound, TooManyParts):
            # Refused for certain. After other errors the database may have named it.
            await self._parts.discard(upload, [part] if part else [])
            raise

    async def _until_given_up(
        self, upload_id: str, chunks: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        async for chunk in chunks:
            if not self._room.budget.is_held(upload_id):
                raise UploadNotFound
            yield chunk


def upload_hold(upload: Upload) -> Hold:
    """The reservation of the disk for an upload."""
    return Hold(upload.id, upload.tenant_id, upload.size_bytes + len(upload.config_json))


def _conflict(upload: Upload, *, is_busy: bool = False) -> UploadConflict:
    return UploadConflict(
        received_bytes=upload.received_bytes, size_bytes=upload.size_bytes, is_busy=is_busy
    )


def _too_large(num_bytes: int, max_bytes: int) -> ApiError:
    return ApiError(
        "body_too_large",
        f"The upload needs {max_bytes} more bytes, but {num_bytes} were sent.",
    )
