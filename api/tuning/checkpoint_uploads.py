"""Stores the newest checkpoint of a running job from time to time.

A trainer writes checkpoints faster than a store should receive them: at most one is stored within
five minutes, the newest.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import structlog

from ...adapters.errors import AdapterError
from ...engine.tuning.checkpoint_files import CheckpointFile, list_checkpoints
from ...platform.errors import PlatformError
from ...platform.tuning.models import TuningJob
from .checkpoint_store import CheckpointStore
from .work_folders import WorkFolder

log = structlog.get_logger(__name__)

STORE_SECONDS = 300.0
"""After a checkpoint was stored, before the next one is: what a lost server costs a job. The first
one is stored at once."""
RETRY_SECONDS = 30.0
"""After a failure, of the store or the database for example."""


class CheckpointUploads:
    """Those of one trainer."""

    def __init__(self, store: CheckpointStore, job: TuningJob, folder: WorkFolder) -> None:
        self._store = store
        self._job = job
        self._folder = folder
        self._stored_step = 0
        self._is_due, self._is_stopped = asyncio.Event(), asyncio.Event()

    def note(self) -> None:
        """There is a new checkpoint."""
        self._is_due.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Store what is noted until the block is left. Then an upload that runs comes to its end,
        unless the block is cancelled."""
        task = asyncio.create_task(self._run())
        try:
            yield
        except BaseException:
            task.cancel()
            raise
        finally:
            self._is_stopped.set()
            self._is_due.set()
            await asyncio.wait([task])

    async def store_last(self) -> None:
        """Store the newest checkpoint if it is not: the job was paused, and may go on elsewhere."""
        await self._store_newest()

    async def _run(self) -> None:
        while True:
            await self._is_due.wait()
            if self._is_stopped.is_set():
                return
            self._is_due.clear()
            is_stored = await self._store_newest()
            if not is_stored:
                self._is_due.set()
            with suppress(TimeoutError):
                pause = STORE_SECONDS if is_stored else RETRY_SECONDS
                await asyncio.wait_for(self._is_stopped.wait(), pause)

    async def _store_newest(self) -> bool:
        """Whether the newest checkpoint is stored."""
        try:
            found = await asyncio.to_thread(list_checkpoints, self._folder.checkpoints)
            if found and found[0].step > self._stored_step:
                async with _held(found[0], self._folder) as file:
                    await self._store.put(self._job, file)
                self._stored_step = found[0].step
        except (PlatformError, AdapterError, OSError) as exc:
            log.warning("checkpoint_not_stored", job=self._job.id, error=str(exc))
            return False
        return True


@asynccontextmanager
async def _held(file: CheckpointFile, folder: WorkFolder) -> AsyncIterator[CheckpointFile]:
    """The checkpoint under another name, which its trainer can neither remove nor replace. Raises
    OSError, also if it is a link."""
    try:
        await asyncio.to_thread(_link, file.path, folder.outgoing)
        yield file._replace(path=folder.outgoing)
    finally:  # this may be the last name of a large file
        await asyncio.to_thread(folder.outgoing.unlink, missing_ok=True)


def _link(path: Path, outgoing: Path) -> None:
    outgoing.unlink(missing_ok=True)
    os.link(path, outgoing, follow_symlinks=False)
    if not stat.S_ISREG(outgoing.lstat().st_mode):
        raise OSError(f"{path.name} is not a regular file")
