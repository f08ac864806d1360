"""Background work that a service repeats."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from structlog.stdlib import BoundLogger

from ...platform.errors import PlatformError
from .background_loop import BackgroundLoop


class Periodic(BackgroundLoop):
    """Runs its work at an interval, and when it is woken. A round that fails is logged, and the
    next one follows."""

    def __init__(
        self,
        work: Callable[[], Awaitable[object]],
        *,
        seconds: float,
        log: BoundLogger,
        failed: str,
        delayed: str | None = None,
        delayed_by: type[Exception] | tuple[type[Exception], ...] = PlatformError,
        at_once: bool = False,
        by_clock: bool = False,
    ) -> None:
        """`seconds`: the interval after each round, and before the first unless `at_once`. With
        `by_clock`, rounds start at multiples of `seconds` of the system's clock.

        A failure is logged in `log` as the event `failed`, with its traceback. A temporary failure,
        of the types `delayed_by`, is logged as a warning, as the event `delayed`, if given.
        """
        super().__init__(self._repeat)
        self._work = work
        self._seconds = seconds
        self._log = log
        self._failed = failed
        self._delayed = delayed or failed
        self._delayed_by = delayed_by
        self._at_once = at_once
        self._by_clock = by_clock
        self._woken = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def wake(self) -> None:
        """Begin the next round now, or when the present one is over. For any thread; without effect
        before `start` and after `close`."""
        if (loop := self._loop) is not None:
            with suppress(RuntimeError):  # the event loop was closed meanwhile
                loop.call_soon_threadsafe(self._woken.set)

    async def _repeat(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            if self._at_once:
                await self._do_round()
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), self._pause())
                self._woken.clear()
                await self._do_round()
        finally:
            self._loop = None

    async def _do_round(self) -> None:
        try:
            await self._work()
        except self._delayed_by as exc:
            self._log.warning(self._delayed, error=str(exc))
        except Exception:  # a defect in one round must not stop the next ones
            self._log.exception(self._failed)

    def _pause(self) -> float:
        early = time.time() % self._seconds if self._by_clock else 0.0
        return self._seconds - early
