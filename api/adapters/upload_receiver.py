"""Receives the bytes of uploads to this server's disk. Acknowledged bytes are on the disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from ...adapters.errors import StorageFull
from ...adapters.failpoints import failpoint
from ...platform.adapters.models import Upload
from ...platform.adapters.states import UploadState
from ...platform.errors import UploadConflict, UploadNotFound
from ..contract.errors import ApiError
from .staging import Staging
from .staging_budget import Hold
from .upload_records import UploadRecords
from .upload_room import UploadRoom

UNDECLARED_BYTES = 1 << 20
"""The room required before reading a body of unknown length."""


class UploadReceiver:
    """Allows one request at a time to write to an upload."""

    def __init__(self, *, staging: Staging, room: UploadRoom, records: UploadRecords) -> None:
        self._staging = staging
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
        await self._make_room(upload, num_bytes)
        chunks = self._until_given_up(upload.id, read(max_bytes))
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

    async def _make_room(self, upload: Upload, num_bytes: int) -> None:
        """Raises StorageFull."""
        budget = self._room.budget
        held_bytes = upload.size_bytes + len(upload.config_json)
        budget.restore([Hold(upload.id, upload.tenant_id, held_bytes)])
        if budget.lacking_to_receive(num_bytes) and not await self._room.make(
            lambda: budget.lacking_to_receive(num_bytes)
        ):
            raise StorageFull

    async def _until_given_up(
        self, upload_id: str, chunks: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        async for chunk in chunks:
            if not self._room.budget.is_held(upload_id):
                raise UploadNotFound
            yield chunk


def _conflict(upload: Upload, *, is_busy: bool = False) -> UploadConflict:
    return UploadConflict(
        received_bytes=upload.received_bytes, size_bytes=upload.size_bytes, is_busy=is_busy
    )


def _too_large(num_bytes: int, max_bytes: int) -> ApiError:
    return ApiError(
        "body_too_large",
        f"The upload needs {max_bytes} more bytes, but {num_bytes} were sent.",
    )
