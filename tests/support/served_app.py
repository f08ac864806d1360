"""An ASGI application with Loraplex's HTTP protocol, without the rest of the server."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable

import uvicorn
from starlette.types import Receive, Scope, Send

from loraplex.api.http.connections import Connections
from loraplex.api.http.protocol import protocol_among

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ServedApp:
    """An application on a port of its own, and a caller of it."""

    def __init__(
        self, app: App, *, max_connections: int = sys.maxsize, keep_alive_seconds: int = 5
    ) -> None:
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            http=protocol_among(Connections(max_connections)),
            ws="none",
            timeout_keep_alive=keep_alive_seconds,
        )
        self._server = uvicorn.Server(config)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)

    async def __aenter__(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        reader, self._writer = await self.connect()
        return reader, self._writer

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """One more connection."""
        host, port = self._listener.getsockname()
        return await asyncio.open_connection(host, port, limit=1 << 12)

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        self._server.should_exit = True
        await self._serving
