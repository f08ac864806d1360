"""An ASGI application behind our HTTP protocol, without the rest of the server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import uvicorn
from starlette.types import Receive, Scope, Send

from loraplex.api.http_protocol import BoundedHttpProtocol

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ServedApp:
    """An application on a port of its own, and a caller of it."""

    def __init__(self, app: App) -> None:
        config = uvicorn.Config(
            app, lifespan="off", log_config=None, http=BoundedHttpProtocol, ws="none"
        )
        self._server = uvicorn.Server(config)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)

    async def __aenter__(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        host, port = self._listener.getsockname()
        reader, self._writer = await asyncio.open_connection(host, port, limit=1 << 12)
        return reader, self._writer

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        self._server.should_exit = True
        await self._serving
