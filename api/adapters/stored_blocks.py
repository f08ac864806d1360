"""Adapters' blocks in the store, as pushes write and verify them."""

from __future__ import annotations

import time

import structlog

from ...adapters.errors import ObjectCorrupt, ObjectNotFound
from ...adapters.examination import IntakeReport
from ...adapters.fetcher import TRANSFER_SECONDS
from ...adapters.identity import AdapterKey
from ...adapters.store import ObjectStore, object_key
from ...platform.adapters.models import AdapterVersion, Upload
from ...platform.base import new_id
from ..control_plane.tenant_threads import AsyncTenantThreads
from .staging import Staging
from .staging_budget import StagingBudget

log = structlog.get_logger(__name__)

NUM_STORE_CALLS = 4


class StoredBlocks:
    """Calls the store in threads that tenants share fairly.

    All raise StorageFull, StoreUnavailable or StoreDenied.
    """

    def __init__(self, *, store: ObjectStore, staging: Staging, budget: StagingBudget) -> None:
        self._store = store
        self._staging = staging
        self._budget = budget
        self._threads = AsyncTenantThreads("store-calls", NUM_STORE_CALLS)

    async def put(self, upload: Upload, report: IntakeReport) -> None:
        """Store the block of the upload's examination."""
        await self._threads.run(upload.tenant_id, self._put, upload, report)

    async def put_if_missing(self, upload: Upload, report: IntakeReport) -> None:
        """Store it if the store does not have it."""
        await self._threads.run(upload.tenant_id, self._put_if_missing, upload, report)

    async def has_whole(self, version: AdapterVersion) -> bool:
        """Whether the store has the version's block undamaged."""
        return await self._threads.run(version.tenant_id, self._has_whole, version)

    def close(self) -> None:
        """Wait for running calls; start no more."""
        self._threads.close()

    def _put(self, upload: Upload, report: IntakeReport) -> None:
        block = self._staging.block_path(upload.id)
        self._store.put_file(_key(upload, report), block, sha256=report.file_sha256)

    def _put_if_missing(self, upload: Upload, report: IntakeReport) -> None:
        if not self._store.exists(_key(upload, report)):
            self._put(upload, report)

    def _has_whole(self, version: AdapterVersion) -> bool:
        key = AdapterKey(version.tenant_id, version.digest)
        path = self._staging.block_path(new_id())
        try:
            with self._budget.writing(version.size_bytes):
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


def _key(upload: Upload, report: IntakeReport) -> str:
    return object_key(AdapterKey(upload.tenant_id, report.digest))
