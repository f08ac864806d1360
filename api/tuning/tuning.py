"""Trains the jobs of all tenants in turn; one for the server.

The lease on a tenant's jobs is renewed while this server trains one of them, so a tenant has one
running job on all servers. If the server dies, another one takes over when the lease has expired;
the same server takes its own jobs again at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from ...platform.servers import service as servers
from ...platform.sessions import PlatformSession
from ...platform.tuning import service
from ...platform.tuning.service import OpenJob
from ..control_plane.leased_runs import LeasedRuns
from ..control_plane.leases import Leases
from ..control_plane.periodic import Periodic
from .job_run import JobRun, RunServices
from .memory_lines import memory_lines

log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0
"""How often a server looks for jobs, and for checkpoints of jobs that have ended."""


class Tuning:
    """Finds jobs and trains them."""

    def __init__(
        self,
        services: RunServices,
        *,
        leases: Leases,
        max_jobs: int,
        is_draining: Callable[[], bool],
    ) -> None:
        self._services = services
        self._runs: LeasedRuns[OpenJob] = LeasedRuns(leases, "job", _lease_name)
        """At most one of a tenant."""
        self._max_jobs = max_jobs
        self._is_draining = is_draining
        self.memory_lines = memory_lines(services.trainers.engine.info, services.trainers.place)
        """What a trainer takes, for the operator."""
        self._looks = Periodic(
            self._look,
            seconds=LOOK_SECONDS,
            log=log,
            failed="jobs_not_found",
            delayed="jobs_delayed",
            at_once=True,
        )
        # By itself: a store that is slow to delete must hold up no job.
        self._removals = Periodic(
            services.checkpoints.remove_needless,
            seconds=LOOK_SECONDS,
            log=log,
            failed="checkpoints_not_removed",
        )

    def start(self) -> None:
        self._services.control_plane.wake_after(("job.create", "job.resume"), self._looks.wake)
        self._looks.start()
        self._removals.start()

    async def close(self) -> None:
        """Stop training; this server or another one goes on from the checkpoints."""
        await self._looks.close()
        await self._removals.close()
        await self._runs.stop()
        await asyncio.to_thread(self._services.checkpoints.close)

    async def _look(self) -> None:
        if self._is_draining():
            await self._runs.stop()
            return
        await self._remove_folders()
        await self._resume_within_budgets()
        if len(self._runs) >= self._max_jobs:
            return
        for job in await self._services.control_plane.read_all_tenants(self._turns):
            if len(self._runs) >= self._max_jobs:
                return
            if all(job.tenant_id != running.tenant_id for running in self._runs):
                await self._runs.begin(job, JobRun(self._services, job).run)

    def _turns(self, session: PlatformSession) -> list[OpenJob]:
        """The jobs that this server may train now: not those whose folders another one has that
        lives."""
        here = {None, self._services.server_id}
        return [
            job
            for job in service.list_turns_of_all_tenants(session)
            if job.server_id in here or not servers.is_alive(session, str(job.server_id))
        ]

    async def _resume_within_budgets(self) -> None:
        """Let the jobs that were paused because of a budget go on, where these allow it."""
        control_plane = self._services.control_plane
        for tenant_id in await control_plane.read_all_tenants(
            service.list_waiting_for_budget_of_all_tenants
        ):
            if await control_plane.read(tenant_id, service.may_resume_within_budget):
                await control_plane.write(tenant_id, service.resume_within_budget)

    async def _remove_folders(self) -> None:
        """Remove the folders of jobs that have ended, or that another server has taken over."""
        folders = self._services.folders
        busy = {job.job_id for job in self._runs}
        if not (found := await asyncio.to_thread(folders.list_jobs) - busy):
            return
        kept = await self._services.control_plane.read_all_tenants(
            lambda session: service.list_kept_of_all_tenants(session, self._services.server_id)
        )
        for job_id in found - kept:
            await asyncio.to_thread(folders.remove, job_id)


def _lease_name(job: OpenJob) -> str:
    """The name of the lease on a tenant's jobs."""
    return f"tuning:{job.tenant_id}"
