"""Accepts connections and does their TLS handshakes, which are limited in time and number.

uvicorn leaves a handshake to the event loop: it may last a minute, and is not counted.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

import structlog

from .connections import Connections

log = structlog.get_logger(__name__)

HANDSHAKE_SECONDS = 10.0
"""From the connection to the end of its handshake."""
PAUSE_SECONDS = 1.0
"""After the system had no descriptor or memory for a connection."""


class Handshakes:
    """The connections of one listener whose handshake has not ended. Each is an idle one among
    `connections`, so that a new connection takes the place of the one that waits for longest."""

    def __init__(
        self,
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        connections: Connections,
    ) -> None:
        """`make_protocol`: for a connection whose handshake has succeeded."""
        self._context = context
        self._make_protocol = make_protocol
        self._connections = connections
        self._running: set[asyncio.Task[None]] = set()

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections until this is cancelled; unfinished handshakes end then."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        try:
            while True:
                try:
                    accepted, _peer = await loop.sock_accept(listener)
                except OSError as exc:
                    log.warning("connection_not_accepted", error=exc.strerror)
                    await asyncio.sleep(PAUSE_SECONDS)
                    continue
                task = loop.create_task(self._shake_hands(accepted))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
        finally:
            for task in self._running:
                task.cancel()

    async def _shake_hands(self, accepted: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        handshake = _Handshake(task)
        self._connections.open(handshake)
        try:
            # It raises OSError for what the peer did wrong, and for the time limit.
            with suppress(OSError):
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._make_protocol,
                    accepted,
                    ssl=self._context,
                    ssl_handshake_timeout=HANDSHAKE_SECONDS,
                )
        finally:
            self._connections.close(handshake)


class _Handshake:
    """A connection that can neither have a request nor be sent a message yet."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def make_room(self, *, at_once: bool) -> None:
        self._task.cancel()
