"""Takes the steps of the evaluations of all tenants; one for the server.

An evaluation waits for its batches without a lease: a step is short, and any server takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import structlog

from ...platform.batches.file_models import StoredFile
from ...platform.errors import EvaluationNotFound
from ...platform.evaluations import service
from ...platform.evaluations.service import OpenEvaluation
from ..batches.tenant_files import TenantFiles
from ..contract.errors import ApiError
from ..control_plane.control_plane import ControlPlane
from ..control_plane.leased_runs import LeasedRuns
from ..control_plane.leases import Leases
from ..control_plane.periodic import Periodic
from ..control_plane.tenant_threads import AsyncTenantThreads
from .run import EvaluationRun, RunServices
from .scoring_process import Scoring, ScoringFailed
from .scoring_task import Invalid, ScoringTask, Valid

log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0
"""How often a server looks for evaluations whose batches have ended."""
MAX_RUNS = 4
"""Steps of one server at a time."""
NUM_THREADS = 2
"""Scoring processes of one server at a time; all but one may be of one tenant."""
MAX_CHECKS = 8
"""Golden sets of one tenant that wait for their check, and its steps."""


class Evaluations:
    """Finds evaluations and takes their next steps."""

    def __init__(
        self,
        *,
        control_plane: ControlPlane,
        leases: Leases,
        files: TenantFiles,
        is_draining: Callable[[], bool],
    ) -> None:
        self._threads = AsyncTenantThreads("scoring", NUM_THREADS, max_calls=MAX_CHECKS + MAX_RUNS)
        self._scoring = Scoring()
        self._services = RunServices(control_plane, files, self._threads, self._scoring)
        self._control_plane = control_plane
        self._runs: LeasedRuns[OpenEvaluation] = LeasedRuns(leases, "evaluation", _lease_name)
        self._files = files
        self._is_draining = is_draining
        self._looks = Periodic(
            self._look,
            seconds=LOOK_SECONDS,
            log=log,
            failed="evaluations_not_found",
            delayed="evaluations_delayed",
            at_once=True,
        )

    def start(self) -> None:
        self._control_plane.wake_after(("evaluation.start", "batch.end"), self._looks.wake)
        self._looks.start()

    async def close(self) -> None:
        """Stop working; other servers go on."""
        await self._looks.close()
        await self._runs.stop()
        self._scoring.kill()
        self._threads.close()

    async def check_golden_set(self, tenant_id: str, file: StoredFile) -> Valid:
        """Check the file's cases. Raises ApiError or an AdapterError."""
        with self._files.staged() as path:
            await self._files.fetch(tenant_id, file, path)
            task = ScoringTask(golden_set=str(path), file_id=file.id)
            try:
                outcome = await self._threads.run(tenant_id, self._scoring.run, task)
            except ScoringFailed as exc:
                raise ApiError("invalid_golden_set", str(exc), param="file") from exc
            except TimeoutError as exc:
                raise ApiError("overloaded") from exc
        if isinstance(outcome, Invalid):
            raise ApiError("invalid_golden_set", outcome.problem, param="file")
        assert isinstance(outcome, Valid), "the task names no models"
        return outcome

    async def _look(self) -> None:
        if self._is_draining():
            await self._runs.stop()
            return
        for evaluation in await self._control_plane.read_all_tenants(
            service.list_ready_of_all_tenants
        ):
            if len(self._runs) >= MAX_RUNS:
                return
            if evaluation not in self._runs:
                await self._runs.begin(evaluation, partial(self._run, evaluation))

    async def _run(self, evaluation: OpenEvaluation) -> None:
        with suppress(EvaluationNotFound):  # its adapter was deleted
            await EvaluationRun(self._services, evaluation).run()


def _lease_name(evaluation: OpenEvaluation) -> str:
    """The name of the lease on an evaluation."""
    return f"evaluation:{evaluation.evaluation_id}"
