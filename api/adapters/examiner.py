"""Examines uploads, each in a separate confined process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ...adapters.added_tokens import FIELD, AddedToken
from ...adapters.disk_room import full_disk_told
from ...adapters.errors import AdapterRejected, StorageFull
from ...adapters.examination import IntakeReport
from ...adapters.intake import IntakeRequest, run_intake
from ...engine.errors import TokenizerUnusable
from ...engine.messages import EngineInfo
from ...platform.adapters.models import Upload
from ..control_plane.tenant_threads import AsyncTenantThreads
from .memory_room import check_fits
from .staging import Staging
from .staging_budget import EXAMINATION_COPIES
from .upload_room import UploadRoom

NUM_EXAMINERS = 1 + max(1, min(2, (os.cpu_count() or 1) // 2))
"""Concurrent intake processes; all but one may be of one tenant."""


class Examiner:
    """Examines complete uploads and stores their blocks beside them."""

    def __init__(
        self,
        *,
        info: EngineInfo,
        layout_path: Path,
        staging: Staging,
        room: UploadRoom,
        max_full_matrix_bytes: int,
        open_tokenizer: Callable[[Sequence[AddedToken]], object],
    ) -> None:
        """`max_full_matrix_bytes`: the maximum size of one adapter's full matrices.
        `open_tokenizer`: the base's tokenizer with added tokens; raises TokenizerUnusable."""
        self._info = info
        self._layout_path = layout_path
        self._staging = staging
        self._room = room
        self._max_full_matrix_bytes = max_full_matrix_bytes
        self._open_tokenizer = open_tokenizer
        self._threads = AsyncTenantThreads("intake", NUM_EXAMINERS)

    async def examine(self, upload: Upload) -> IntakeReport:
        """Examine the upload in the tenant's order; retries once if room had to be made.

        Raises AdapterRejected, StorageFull or another AdapterError.
        """
        try:
            return await self._threads.run(upload.tenant_id, self._examine, upload)
        except StorageFull:
            self._staging.discard_block(upload.id)
            needed = _needed_bytes(upload)
            if not await self._room.make(lambda: self._room.budget.lacking_to_write(needed)):
                raise
            return await self._threads.run(upload.tenant_id, self._examine, upload)

    def close(self) -> None:
        """Wait for running examinations; start no more."""
        self._threads.close()

    def _examine(self, upload: Upload) -> IntakeReport:
        """Runs in a thread."""
        with self._room.budget.writing(_needed_bytes(upload)) as room_bytes, full_disk_told():
            self._check_bytes(upload)
            report = run_intake(self._prepare(upload, room_bytes))
        check_fits(report, self._info)
        if report.added_tokens:
            self._check_tokens(report.added_tokens)
        return report

    def _check_tokens(self, added: Sequence[AddedToken]) -> None:
        """Raise AdapterRejected unless the tokens follow those of the base."""
        try:
            self._open_tokenizer(added)
        except TokenizerUnusable as exc:
            raise AdapterRejected("resized_vocabulary", str(exc), pointer=f"/{FIELD}") from exc

    def _check_bytes(self, upload: Upload) -> None:
        if self._staging.num_bytes(upload.id) != upload.size_bytes:
            raise AdapterRejected("intake_failed", "The received bytes were lost; push again.")
        if self._staging.sha256(upload.id) != upload.sha256:
            raise AdapterRejected("digest_mismatch", "The bytes do not have the declared SHA-256.")

    def _prepare(self, upload: Upload, room_bytes: int) -> IntakeRequest:
        """Write the configuration beside the weights."""
        config_path = self._staging.config_path(upload.id)
        block_path = self._staging.block_path(upload.id)
        config_path.write_text(upload.config_json)
        block_path.unlink(missing_ok=True)
        return IntakeRequest(
            config_path=str(config_path),
            weights_path=str(self._staging.weights_path(upload.id)),
            output_path=str(block_path),
            layout_path=str(self._layout_path),
            serving_dtype=self._info.dtype,
            max_full_matrix_bytes=self._max_full_matrix_bytes,
            room_bytes=room_bytes,
        )


def _needed_bytes(upload: Upload) -> int:
    return EXAMINATION_COPIES * upload.size_bytes
