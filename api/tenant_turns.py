"""Threads that tenants share by turns: whoever asks for much waits behind itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from .errors import ApiError
from .threads import WorkerThreads

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

MAX_WAITING = 1024
"""Calls of one tenant; more are refused."""


@dataclass(slots=True)
class _Line:
    num_calls: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class TenantTurns:
    """Runs blocking calls in threads, one at a time of each tenant.

    So a tenant's calls wait for each other, and for at most one call of each other tenant.
    """

    def __init__(self, threads: WorkerThreads) -> None:
        self._threads = threads
        self._lines: dict[str, _Line] = {}

    async def run(
        self,
        tenant_id: str,
        function: Callable[Parameters, Result],
        /,
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        """The function's result. It keeps the turn until it ends, even if the caller is cancelled.

        Raises ApiError if too many of the tenant's calls wait.
        """
        line = self._lines.setdefault(tenant_id, _Line())
        if line.num_calls >= MAX_WAITING:
            raise ApiError("tenant_queue_full")
        line.num_calls += 1
        try:
            await line.turn.acquire()
        except BaseException:
            self._leave(tenant_id, line)
            raise
        running = self._threads.run(function, *args, **kwargs)

        def end_turn(ended: asyncio.Future[Result]) -> None:
            line.turn.release()
            self._leave(tenant_id, line)
            if not ended.cancelled():
                ended.exception()  # it has been looked at, should the caller be gone

        running.add_done_callback(end_turn)
        return await asyncio.shield(running)

    def _leave(self, tenant_id: str, line: _Line) -> None:
        line.num_calls -= 1
        if not line.num_calls:
            del self._lines[tenant_id]
