"""Sends adapters' files to a follower on another host. Torch-free."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

PIECE_BYTES = 1 << 20
SIZE_BYTES = 8
MISSING = b""
"""Instead of the size of a file that is not there."""


class FileSender:
    """Sends one file after the other, in a thread: rank 0 decides which, and their order."""

    def __init__(self, connection: Connection[bytes, bytes], on_lost: Callable[[], None]) -> None:
        """`on_lost`: called in the thread once nothing can be sent any more."""
        self._connection = connection
        self._on_lost = on_lost
        self._paths: SimpleQueue[Path] = SimpleQueue()
        Thread(target=self._run, name="file-sender", daemon=True).start()

    def send(self, path: Path) -> None:
        """Send a file behind those before it; does not wait."""
        self._paths.put(path)

    def close(self) -> None:
        """End the connection."""
        # The descriptor stays open, see `RankPipe.close`.
        duplicate = socket.socket(fileno=os.dup(self._connection.fileno()))
        with duplicate, suppress(OSError):
            duplicate.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            while True:
                self._send(self._paths.get())
        except OSError:
            self.close()
            self._on_lost()

    def _send(self, path: Path) -> None:
        try:
            file = path.open("rb", buffering=0)
        except FileNotFoundError:
            self._connection.send_bytes(MISSING)
            return
        with file:
            left = os.fstat(file.fileno()).st_size
            self._connection.send_bytes(left.to_bytes(SIZE_BYTES, "big"))
            while left:
                piece = file.read(min(left, PIECE_BYTES))
                if not piece:
                    raise OSError("a file was truncated while it was sent")
                self._connection.send_bytes(piece)
                left -= len(piece)
