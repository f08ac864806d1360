"""The agent of a replica: an engine on this machine for API servers on others.

It knows no tenant's key and no database. It serves under a lease that the API servers renew in the
database. An agent whose lease has ended ends too, and wipes what it holds of adapters, so that a
deletion need not wait for a machine that nobody can reach.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum

from ..messages import Hello
from ..process.engine import EngineState
from .agent_session import AgentSession
from .link import AgentLink, LinkServer
from .replica import Replica

RENEWAL_SECONDS = 3.0
LOOK_SECONDS = 0.25

_log = logging.getLogger(__name__)


class AgentEnd(StrEnum):
    """Why an agent ended."""

    STOPPED = "stopped"
    """It was asked to."""
    FENCED = "fenced"
    """Its lease has ended."""
    ENGINE_DOWN = "engine_down"
    """Its engine died too often."""


def new_incarnation() -> str:
    """The name of an agent's life. Later ones of one machine are greater as strings."""
    return f"{time.time_ns() // 1_000_000:013d}-{secrets.token_hex(8)}"


class Agent:
    """Runs a replica and listens for API servers."""

    def __init__(self, replica: Replica, *, context: ssl.SSLContext) -> None:
        self.incarnation = new_incarnation()
        self._replica = replica
        self._context = context
        self._is_stopping = asyncio.Event()
        self._drain_seconds = 0.0

    def stop(self, *, drain_seconds: float) -> None:
        """Accept no further requests, and end when the open ones have, or after this time."""
        self._drain_seconds = drain_seconds
        self._is_stopping.set()

    async def run(
        self, host: str, port: int, *, on_listening: Callable[[int], None] = lambda port: None
    ) -> AgentEnd:
        """Start the engine, serve, and return when the agent has ended; nothing runs then.

        `on_listening` gets the port when the engine is ready. Raises OSError if the address cannot
        be listened on, and what `Engine.start` raises.
        """
        engine = self._replica.engine
        starting = asyncio.create_task(engine.start())
        stopping = asyncio.create_task(self._is_stopping.wait())
        try:
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return AgentEnd.STOPPED
            await starting
            return await self._serve(host, port, on_listening)
        finally:
            starting.cancel()
            stopping.cancel()
            await engine.stop()
            with suppress(asyncio.CancelledError, Exception):
                await starting

    async def _serve(self, host: str, port: int, on_listening: Callable[[int], None]) -> AgentEnd:
        info = self._replica.engine.info
        server = await LinkServer.start(
            host,
            port,
            context=self._context,
            hello=Hello(info.base_id, info.runtime_id, self.incarnation),
            accept=self._accept,
        )
        renewing = asyncio.create_task(self._renew())
        try:
            on_listening(server.port)
            return await self._until_end()
        finally:
            renewing.cancel()
            self._replica.close()
            await server.close()

    def _accept(self, link: AgentLink) -> AgentSession:
        session = AgentSession(self._replica, link)
        self._replica.welcome(session)
        return session

    async def _renew(self) -> None:
        while True:
            self._replica.ask_for_lease()
            await asyncio.sleep(RENEWAL_SECONDS)

    async def _until_end(self) -> AgentEnd:
        while not self._is_stopping.is_set():
            if self._replica.lease.is_lost:
                _log.error("agent_fenced", extra={"incarnation": self.incarnation})
                return AgentEnd.FENCED
            if self._replica.engine.state is EngineState.DOWN:
                return AgentEnd.ENGINE_DOWN
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._is_stopping.wait()
        await self._drain()
        return AgentEnd.STOPPED

    async def _drain(self) -> None:
        self._replica.drain()
        ends_at = time.monotonic() + self._drain_seconds
        while self._replica.num_open and time.monotonic() < ends_at:
            await asyncio.sleep(LOOK_SECONDS)
