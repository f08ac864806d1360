"""Where a follower finds the adapters' files that it reads. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from .file_sender import MISSING, PIECE_BYTES, SIZE_BYTES


class AdapterFiles(Protocol):
    """Files by the paths that they have on rank 0's host."""

    def open(self, path: str) -> AbstractContextManager[Path]:
        """Where the file can be opened meanwhile. Each is asked for once, in the order of the
        commands. Raises FileNotFoundError, EOFError, OSError."""
        ...


class LocalFiles:
    """Those of rank 0's host, which is this one."""

    @contextmanager
    def open(self, path: str) -> Iterator[Path]:
        """See `AdapterFiles`."""
        yield Path(path)


class SentFiles:
    """What a `FileSender` on rank 0's host sends, kept in memory while it is read."""

    def __init__(self, connection: Connection[bytes, bytes]) -> None:
        self._connection = connection

    @contextmanager
    def open(self, path: str) -> Iterator[Path]:
        """See `AdapterFiles`."""
        size = self._connection.recv_bytes(SIZE_BYTES)
        if size == MISSING:
            raise FileNotFoundError(path)
        descriptor = os.memfd_create("adapter")
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            left = int.from_bytes(size, "big")
            while left:
                piece = self._connection.recv_bytes(PIECE_BYTES)
                file.write(piece)
                left -= len(piece)
            yield Path(f"/proc/self/fd/{descriptor}")
