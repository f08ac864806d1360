"""Trains one job: lays its data into its folder, runs trainers, publishes the result.

It may stop at any point, and another run does the rest: of this server, from the last checkpoint,
or of another one, from the last one in the object store.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import structlog

from ...adapters.errors import ObjectCorrupt, ObjectNotFound
from ...adapters.failpoints import failpoint
from ...engine.tuning.messages import Failed, Finished
from ...platform.audit.event import BY_SYSTEM, Changed, Event
from ...platform.batches import files
from ...platform.errors import FileNotFound
from ...platform.sessions import TenantSession
from ...platform.tuning import service
from ...platform.tuning.models import TuningJob
from ...platform.tuning.service import OpenJob
from ...platform.tuning.states import JobState
from ..batches.tenant_files import TenantFiles
from ..contract.error_codes import TUNING_CODES
from ..control_plane.control_plane import ControlPlane
from ..telemetry.metrics import Metrics
from .attempt import Attempt, TrainerSetup
from .checkpoint_store import CheckpointStore
from .job_failed import JobFailed
from .publication import Publication
from .work_folders import WorkFolders

log = structlog.get_logger(__name__)

MAX_RESTARTS = 3
"""Of a job's trainer that ends without a result."""
RESTART_SECONDS = 1.0
"""Before the first restart; doubled before each further one."""


@dataclass(frozen=True, slots=True)
class RunServices:
    """What the runs of a server use."""

    server_id: str
    control_plane: ControlPlane
    files: TenantFiles
    folders: WorkFolders
    checkpoints: CheckpointStore
    publication: Publication
    trainers: TrainerSetup
    metrics: Metrics


class JobRun:
    """One server's work on one job, whose tenant's lease it has."""

    def __init__(self, services: RunServices, job: OpenJob) -> None:
        self._services = services
        self._control_plane = services.control_plane
        self._tenant_id = job.tenant_id
        self._tenant_slug = job.tenant_slug
        self._job_id = job.job_id
        self._folder = services.folders.of(job.job_id)

    async def run(self) -> None:
        """Return when the job has ended or is paused. Raises OSError, a PlatformError or an
        AdapterError; another run does the rest."""
        job = await self._control_plane.write(
            self._tenant_id,
            lambda session: service.begin(session, self._job_id, self._services.server_id),
        )
        if job.state is not JobState.RUNNING:
            return
        failpoint("tuning.begun")
        try:
            await self._run(job)
        except JobFailed as exc:
            await self._fail(exc)

    async def _run(self, job: TuningJob) -> None:
        is_trained = job.finalizing_at is not None and self._folder.has_result
        if not is_trained and not await self._train(job):
            return
        job = await self._control_plane.write(
            self._tenant_id, lambda session: service.close(session, self._job_id)
        )
        failpoint("tuning.trained")
        if job.state is JobState.RUNNING:
            await self._publish(job)

    # --- training ---------------------------------------------------------------------------------

    async def _train(self, job: TuningJob) -> bool:
        """Whether the result is in the folder; False: the job was paused or cancelled. Raises
        JobFailed."""
        await asyncio.to_thread(self._folder.make)
        await self._lay_data(job)
        while True:
            services = self._services
            await services.checkpoints.lay(job, self._folder)
            attempt = Attempt(
                services.trainers,
                self._control_plane,
                services.metrics,
                job,
                self._folder,
                services.checkpoints,
            )
            last_word = await attempt.run()
            job = attempt.job
            if isinstance(last_word, Failed):
                raise _failure(last_word)
            if isinstance(last_word, Finished) and self._folder.has_result:
                return True
            if job.state is not JobState.RUNNING:
                return False
            job = await self._note_restart(attempt.status)
            if job.num_restarts > MAX_RESTARTS:
                message = f"The trainer ended {job.num_restarts} times without a result."
                raise JobFailed("training_failed", message)
            await asyncio.sleep(RESTART_SECONDS * 2 ** (job.num_restarts - 1))

    async def _note_restart(self, status: int) -> TuningJob:
        ending = f"signal {-status}" if status < 0 else f"status {status}"
        reason = f"The trainer ended without a result ({ending})."
        return await self._control_plane.write(
            self._tenant_id,
            lambda session: service.note_restart(session, self._job_id, reason),
        )

    async def _lay_data(self, job: TuningJob) -> None:
        """Write the job's files into its folder. Raises JobFailed if one is lost."""
        await self._fetch(job.training_file_id, self._folder.training_file, "training_file")
        if job.validation_file_id is not None:
            path = self._folder.validation_file
            await self._fetch(job.validation_file_id, path, "validation_file")

    async def _fetch(self, file_id: str, path: Path, param: str) -> None:
        try:
            file = await self._control_plane.read(
                self._tenant_id, lambda session: files.get_input(session, file_id)
            )
            await self._services.files.fetch(self._tenant_id, file, path)
        except (FileNotFound, ObjectNotFound, ObjectCorrupt) as exc:
            message = f"The file `{file_id}` cannot be read: upload it again."
            raise JobFailed("file_not_found", message, param=param) from exc

    # --- its end ----------------------------------------------------------------------------------

    async def _publish(self, job: TuningJob) -> None:
        services = self._services
        version = await services.publication.publish(job, self._tenant_slug, self._folder)
        failpoint("tuning.published")
        base_id = services.trainers.engine.info.base_id

        def succeed(session: TenantSession) -> Changed[TuningJob]:
            ended = service.succeed(session, self._job_id, version=version, base_id=base_id)
            return Changed(ended, _ended(ended))

        await self._control_plane.change(self._tenant_id, BY_SYSTEM, succeed)
        failpoint("tuning.ended")
        services.metrics.tuning.note_job("succeeded")

    async def _fail(self, failure: JobFailed) -> None:
        def fail(session: TenantSession) -> Changed[TuningJob]:
            job = service.fail(
                session, self._job_id, code=failure.code, message=str(failure), param=failure.param
            )
            return Changed(job, _ended(job) if job.state is JobState.FAILED else None)

        job = await self._control_plane.change(self._tenant_id, BY_SYSTEM, fail)
        if job.state is JobState.FAILED:
            self._services.metrics.tuning.note_job("failed")


def _failure(message: Failed) -> JobFailed:
    """What the trainer says, with a published code."""
    text = message.message if message.line is None else f"Line {message.line}: {message.message}"
    param = "training_file" if message.code == "invalid_training_data" else None
    code = message.code if message.code in TUNING_CODES else "training_failed"
    return JobFailed(code, text, param=param)


def _ended(job: TuningJob) -> Event:
    details = {
        "state": job.state,
        "adapter": job.adapter_name,
        "version": job.version,
        "trained_tokens": job.num_tokens,
        "error": job.error_code,
    }
    return Event("job.end", job.id, details)
