"""Serving the application until a signal says to stop, and then letting requests finish."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from collections.abc import Callable, Sequence

import uvicorn
import uvloop

from ..engine.config import EngineConfig
from .app import create_app
from .runtime import Runtime, open_runtime
from .settings import Settings

GRACE_SECONDS = 5
"""For the last error events to reach their callers, behind the time to drain."""
KEEP_ALIVE_SECONDS = 75
"""Longer than the idle time of common proxies, so that they close first."""


class DrainingServer(uvicorn.Server):
    """Told to stop, it takes no new connections; what outlives the drain ends with an error."""

    def __init__(self, runtime: Runtime) -> None:
        drain_seconds = runtime.settings.drain_seconds
        super().__init__(
            uvicorn.Config(
                create_app(runtime),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=math.ceil(drain_seconds) + GRACE_SECONDS,
            )
        )
        self._engine = runtime.engine
        self._drain_seconds = drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_stragglers())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_stragglers(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        await self._engine.stop()


def bind(host: str, port: int) -> socket.socket:
    """The address to serve at, taken but not listening yet. Raises OSError if it is in use."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def run_server(
    settings: Settings,
    engine_config: EngineConfig,
    *,
    listener: socket.socket,
    announce: Callable[[Runtime], None],
) -> None:
    """Serve until SIGTERM or SIGINT; `announce` is called when everything is up.

    Raises a PlatformError, EngineError or AdapterError if a part cannot start.
    """

    async def serve() -> None:
        async with open_runtime(settings, engine_config) as runtime:
            _let_uvicorn_decide((signal.SIGTERM, signal.SIGINT))
            announce(runtime)
            await DrainingServer(runtime).serve(sockets=[listener])

    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def _let_uvicorn_decide(signals: Sequence[signal.Signals]) -> None:
    """A drained server exits with 0: uvicorn raises the signal again when it is done."""
    for number in signals:
        signal.signal(number, lambda _number, _frame: None)
