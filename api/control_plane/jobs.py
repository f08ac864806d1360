"""Periodic upkeep jobs, each run by one of the servers at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import structlog

from ...adapters.errors import AdapterError
from ...platform.errors import PlatformError
from .leases import LeaseLost, Leases

log = structlog.get_logger(__name__)

POLL_SECONDS = 60.0
"""How often each server checks whether a job is due."""
RETRY = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Work that repeats."""

    name: str
    every: timedelta
    run: Callable[[], Awaitable[object]]
    """May be done twice, or stopped anywhere: the next time does the rest."""


class Jobs:
    """Runs the due jobs that no other server runs; one per server."""

    def __init__(self, leases: Leases, jobs: Sequence[Job]) -> None:
        self._leases = leases
        self._jobs = jobs
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._repeat(job)) for job in self._jobs]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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

    async def _repeat(self, job: Job) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                if await self.run_if_due(job):
                    log.info("job_done", job=job.name)
            except (PlatformError, AdapterError, LeaseLost) as exc:
                log.warning("job_delayed", job=job.name, error=str(exc))
            except Exception:
                log.exception("job_failed", job=job.name)


async def _awaited(job: Job) -> None:
    await job.run()
