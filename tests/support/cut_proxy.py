"""A TCP proxy whose connections can be cut in the middle of what is sent."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread

_RESET = struct.pack("ii", 1, 0)


class CutProxy:
    """Passes on what connections send in both directions."""

    def __init__(self, listener: socket.socket, target: tuple[str, int]) -> None:
        self._listener = listener
        self._target = target
        self._open: list[socket.socket] = []
        self._left: int | None = None
        """Bytes to rank 0's followers until all connections are cut; None: no cut."""

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def cut_after(self, num_bytes: int) -> None:
        """Reset all connections once so many more bytes have come from the target."""
        self._left = num_bytes

    def run(self) -> None:
        """Until the listener is closed."""
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except OSError:
                    client.close()
                    continue
                self._open += [client, server]
                Thread(target=self._pass, args=(client, server, False), daemon=True).start()
                Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        self._cut()

    def _pass(self, source: socket.socket, target: socket.socket, is_counted: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if is_counted and self._left is not None and len(data) >= self._left:
                    target.sendall(data[: self._left])
                    self._cut()
                    return
                if is_counted and self._left is not None:
                    self._left -= len(data)
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _cut(self) -> None:
        self._left = None
        for each in self._open:
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open.clear()


@contextmanager
def cut_proxy(target: tuple[str, int]) -> Iterator[CutProxy]:
    """A running one."""
    proxy = CutProxy(socket.create_server(("127.0.0.1", 0)), target)
    Thread(target=proxy.run, daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.close()
