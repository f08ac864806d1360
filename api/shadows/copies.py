"""Has live answers compared, some at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic

import structlog
from prometheus_client import Counter

from ...platform.errors import PlatformError
from ..control_plane.background_loop import BackgroundLoop
from ..inference.live_answers import AnswerQueue, LiveAnswer, Other

log = structlog.get_logger(__name__)

NUM_AT_ONCE = 2
"""Of each queue, in the engine: others wait in memory, and then are dropped."""


class Copies(Generic[Other]):
    """Takes the answers of a queue."""

    def __init__(
        self,
        queue: AnswerQueue[Other],
        compare: Callable[[LiveAnswer[Other]], Awaitable[str]],
        outcomes: Counter,
    ) -> None:
        """`compare` returns the outcome that is counted; what it raises ends no other."""
        self._queue: AnswerQueue[Other] = queue
        self._compare: Callable[[LiveAnswer[Other]], Awaitable[str]] = compare
        self._outcomes = outcomes
        self._loops = [BackgroundLoop(self._run) for _ in range(NUM_AT_ONCE)]

    def start(self) -> None:
        for loop in self._loops:
            loop.start()

    async def close(self) -> None:
        """Stop; running copies are not charged, and waiting ones are forgotten."""
        await asyncio.gather(*(loop.close() for loop in self._loops))

    async def _run(self) -> None:
        while True:
            live = await self._queue.take()
            try:
                outcome = await self._compare(live)
            except PlatformError as exc:
                log.warning("copy_dropped", version=live.other.version.pinned, error=str(exc))
                outcome = "dropped"
            except Exception:  # a defect at one copy must not stop the others
                log.exception("copy_failed", version=live.other.version.pinned)
                outcome = "dropped"
            self._outcomes.labels(outcome).inc()
