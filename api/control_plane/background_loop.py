"""A background coroutine that runs while a service is open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class BackgroundLoop:
    """One task, from `start` to `close`."""

    def __init__(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`run` must run until it is cancelled."""
        self._run = run
        self._task: asyncio.Task[None] | None = None

    @property
    def is_started(self) -> bool:
        """Whether it was started, even if it is closed now."""
        return self._task is not None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Cancel the loop and wait for its end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
