"""A TCP proxy that harms the bytes of a connection, whatever they mean: cuts, delays, corrupts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from support.fault_proxy import flipped, reset

_READ_BYTES = 1 << 16

Pass = Callable[[bytes], bytes | None]
"""What becomes of received bytes; None: the connection is reset."""


def unharmed(data: bytes) -> bytes:
    return data


def swallowed(_: bytes) -> bytes:
    """As on a path that loses all packets: neither end is told."""
    return b""


def cut(_: bytes) -> None:
    """Both ends are reset."""


def delayed(data: bytes) -> bytes:
    time.sleep(0.05)
    return data


def corrupted(data: bytes) -> bytes:
    return flipped(data)


class StreamProxy:
    """A proxy at `port`, in its own thread, until the block is left."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="stream-proxy", daemon=True)
        self._ready = threading.Event()
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.treat: Pass = unharmed
        """What happens to all bytes from now on."""

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(30)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stopped.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._join(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        try:
            await asyncio.gather(
                self._carry(reader, to_there, writer), self._carry(there, writer, to_there)
            )
        finally:
            writer.close()
            to_there.close()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, back: asyncio.StreamWriter
    ) -> None:
        try:
            while data := await reader.read(_READ_BYTES):
                treated = self.treat(data)
                if treated is None:
                    reset(writer)
                    reset(back)
                    return
                writer.write(treated)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()
