"""Monitors whether the database is available, so that requests need not find out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import structlog

from ...platform.errors import DatabaseUnavailable
from .background_loop import BackgroundLoop
from .threads import WorkerThreads

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

LOOK_SECONDS = 1.0
PATIENCE_SECONDS = 3.0
"""A database that does not answer a check for this long counts as unavailable."""
PAUSE_SECONDS = 0.1
"""The minimum interval of checks."""
FIRST_RETRY_SECONDS = 0.5
MAX_RETRY_SECONDS = 15.0


async def until_answered(work: Callable[[], Awaitable[Result]]) -> Result:
    """The result of the work, which is retried while the database is busy or unavailable.

    For background work whose loss would be expensive.
    """
    pause = FIRST_RETRY_SECONDS
    while True:
        try:
            return await work()
        except DatabaseUnavailable as exc:
            log.warning("database_work_delayed", seconds=pause, error=str(exc))
        await asyncio.sleep(pause)
        pause = min(2 * pause, MAX_RETRY_SECONDS)


class DatabaseWatch:
    """Sends a simple query every second, and immediately after a failed operation.

    While the database is unavailable, work is refused without being tried, and hanging work is
    abandoned: a thread that waits for a silent database is blocked until the database answers.
    """

    def __init__(self, ping: Callable[[], None]) -> None:
        """`ping` raises DatabaseUnavailable, or hangs, if the database does not answer."""
        self._ping = ping
        self._threads = WorkerThreads("database-watch", 1)
        self._is_suspect = asyncio.Event()
        self._working: set[asyncio.Future[Any]] = set()
        self._loop = BackgroundLoop(self._run)
        self.is_away = False

    def start(self) -> None:
        self._loop.start()

    async def close(self) -> None:
        await self._loop.close()
        self._threads.close()

    async def unless_away(self, begin: Callable[[], Awaitable[Result]]) -> Result:
        """The result of the work that `begin` starts.

        Raises DatabaseUnavailable if the database is unavailable or becomes so meanwhile; abandoned
        work may still finish.
        """
        if self.is_away:
            raise DatabaseUnavailable
        work = asyncio.ensure_future(begin())
        self._working.add(work)
        try:
            return await work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.is_away and not (task and task.cancelling()):
                raise DatabaseUnavailable from None
            raise
        except DatabaseUnavailable:
            self._is_suspect.set()
            raise
        finally:
            self._working.discard(work)

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._is_suspect.wait()
            self._is_suspect.clear()
            self._note(is_away=not await self._answers())
            await asyncio.sleep(PAUSE_SECONDS)

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._threads.run(self._ping)
        except (TimeoutError, DatabaseUnavailable):
            return False
        return True

    def _note(self, *, is_away: bool) -> None:
        if is_away != self.is_away:
            log.warning("database_away" if is_away else "database_back")
        self.is_away = is_away
        if is_away:
            for work in list(self._working):
                work.cancel()
