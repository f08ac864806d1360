"""Periodic upkeep jobs, each run by one of the servers at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import structlog

from ...adapters.errors import AdapterError
from ...platform.errors import PlatformError
from .leases import LeaseLost, Leases
from .periodic import Periodic

log = structlog.get_logger(__name__)

POLL_SECONDS = 60.0
"""How often each server checks whether a job is due."""
RETRY = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A periodic job."""

    name: str
    every: timedelta
    run: Callable[[], Awaitable[object]]
    """The work may run twice or stop at any point; the next run does the rest."""


class Jobs:
    """Runs the due jobs that no other server runs; one per server."""

    def __init__(self, leases: Leases, jobs: Sequence[Job]) -> None:
        self._leases = leases
        self._looks = [self._looks_for(job) for job in jobs]

    def start(self) -> None:
        for looks in self._looks:
            looks.start()

    async def close(self) -> None:
        await asyncio.gather(*(looks.close() for looks in self._looks))

    async def run_if_due(self, job: Job) -> bool:
        """Run the job unless it is not due or another server runs it; returns whether it ran.

        Raises the errors of the job or the database.
        """
        if not await self._leases.claim(job.name, every=job.every):
            return False
        try:
            await self._leases.keep(job.name, _awaited(job))
        except BaseException:
            with suppress(PlatformError):
                await self._leases.postpone(job.name, RETRY)
            raise
        await self._leases.finish(job.name)
        return True

    def _looks_for(self, job: Job) -> Periodic:
        return Periodic(
            partial(self._look, job),
            seconds=POLL_SECONDS,
            log=log.bind(job=job.name),
            failed="job_failed",
            delayed="job_delayed",
            delayed_by=(PlatformError, AdapterError, LeaseLost),
        )

    async def _look(self, job: Job) -> None:
        if await self.run_if_due(job):
            log.info("job_done", job=job.name)


async def _awaited(job: Job) -> None:
    await job.run()
