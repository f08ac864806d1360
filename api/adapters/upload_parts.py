"""The parts of unfinished uploads in the store, where every server reaches them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from ...adapters.disk_room import full_disk_told
from ...adapters.errors import AdapterError, AdapterRejected, ObjectCorrupt, ObjectNotFound
from ...adapters.fetcher import TRANSFER_SECONDS
from ...adapters.store import ObjectStore, part_key
from ...adapters.wiping import file_digest, read_pieces, write_all
from ...platform.adapters.models import Upload
from ...platform.adapters.upload_part import UploadPart
from ...platform.base import new_id
from ..control_plane.tenant_threads import AsyncTenantThreads
from .staging import Staging

log = structlog.get_logger(__name__)

NUM_PART_CALLS = 4


class UploadParts:
    """Calls the store in threads that tenants share fairly."""

    def __init__(self, *, store: ObjectStore, staging: Staging) -> None:
        self._store = store
        self._staging = staging
        self._threads = AsyncTenantThreads("upload-parts", NUM_PART_CALLS)

    async def put(self, upload: Upload) -> UploadPart | None:
        """Store the bytes of the part's file; None if there are none.

        Durable when this returns, and nothing names them yet. Raises StorageFull, StoreUnavailable
        or StoreDenied.
        """
        return await self._threads.run(upload.tenant_id, self._put, upload)

    async def assemble(self, upload: Upload) -> None:
        """Write the file of the weights from the parts.

        Raises AdapterRejected if one is lost or damaged, StorageFull, StoreUnavailable or
        StoreDenied.
        """
        await self._threads.run(upload.tenant_id, self._assemble, upload)

    async def discard(self, upload: Upload, parts: Sequence[UploadPart]) -> None:
        """Delete the objects of parts that nothing names any more; the garbage collection deletes
        those that the store keeps."""
        try:
            await self._threads.run(upload.tenant_id, self._discard, upload, parts)
        except AdapterError as exc:
            log.warning("upload_parts_not_deleted", upload_id=upload.id, error=str(exc))

    def close(self) -> None:
        """Wait for running calls; start no more."""
        self._threads.close()

    def _put(self, upload: Upload) -> UploadPart | None:
        path = self._staging.part_path(upload.id)
        if not path.exists() or not path.stat().st_size:
            return None
        part = UploadPart(new_id(), path.stat().st_size, file_digest(path).hexdigest())
        self._store.put_file(_key(upload, part), path, sha256=part.sha256)
        return part

    def _assemble(self, upload: Upload) -> None:
        fetched = self._staging.fetched_path(upload.id)
        weights = self._staging.weights_path(upload.id)
        with full_disk_told(), weights.open("wb", buffering=0) as assembled:
            for part in upload.stored_parts:
                self._fetch(upload, part, fetched)
                with fetched.open("rb", buffering=0) as bytes_of_part:
                    for piece in read_pieces(bytes_of_part):
                        write_all(assembled, piece)
        fetched.unlink(missing_ok=True)

    def _fetch(self, upload: Upload, part: UploadPart, path: Path) -> None:
        try:
            self._store.fetch_file(
                _key(upload, part),
                path,
                sha256=part.sha256,
                size_bytes=part.size_bytes,
                deadline=time.monotonic() + TRANSFER_SECONDS,
            )
        except (ObjectNotFound, ObjectCorrupt) as exc:
            log.warning("upload_part_lost", upload_id=upload.id, error=str(exc))
            message = "The received bytes were lost; push again."
            raise AdapterRejected("intake_failed", message) from exc

    def _discard(self, upload: Upload, parts: Sequence[UploadPart]) -> None:
        for part in parts:
            self._store.delete(_key(upload, part))


def _key(upload: Upload, part: UploadPart) -> str:
    return part_key(upload.tenant_id, upload.id, part.id)
