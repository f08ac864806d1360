"""Runs of a server on work that is done by one server at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, Generic, TypeVar

import structlog

from ...adapters.errors import AdapterError
from ...platform.errors import PlatformError
from .leases import LeaseLost, Leases

Work = TypeVar("Work", bound=Hashable)

log = structlog.get_logger(__name__)

RETRY = timedelta(seconds=10)
"""After a failure, of the database or the store for example."""


class LeasedRuns(Generic[Work]):
    """The work on which this server runs now: it keeps the lease of each until its run is over.

    If a run fails, any server may try again after the pause; if it is stopped, at once.
    """

    def __init__(self, leases: Leases, kind: str, name: Callable[[Work], str]) -> None:
        """`kind`: begins the events of the log, such as `batch_delayed`. `name`: of the lease on
        some work."""
        self._leases = leases
        self._kind = kind
        self._name = name
        self._tasks: dict[Work, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[Work]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    async def begin(self, work: Work, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run, unless another server has the lease. Raises a PlatformError."""
        if await self._leases.claim(self._name(work)):
            task = asyncio.create_task(self._keep(work, run))
            self._tasks[work] = task
            # Once the lease is released: its own server may claim it until then, and would lose it.
            task.add_done_callback(lambda _: self._tasks.pop(work))

    async def stop(self) -> None:
        """Cancel all runs; other servers go on."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, work: Work, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        name = self._name(work)
        bound, pause = log.bind(lease=name), RETRY
        try:
            await self._leases.keep(name, run())
            await self._leases.forget(name)
            bound.info(f"{self._kind}_left")
            return
        except LeaseLost:
            bound.warning(f"{self._kind}_taken_over")
            return
        except asyncio.CancelledError:
            pause = timedelta(0)
            raise
        except (PlatformError, AdapterError, OSError) as exc:
            bound.warning(f"{self._kind}_delayed", error=str(exc))
        except Exception:  # a defect in one must not stop the others
            bound.exception(f"{self._kind}_failed_unexpectedly")
        finally:
            with suppress(PlatformError):  # it expires
                await self._leases.postpone(name, pause)
