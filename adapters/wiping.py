"""Reads adapter bytes without leaving a copy in this process's memory.

Freed memory keeps its content until it is overwritten. Code that reads an adapter therefore uses
these buffers, which are zeroed after use (decision 35).
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

READ_BYTES = 256 << 10


class Writable(Protocol):
    """An unbuffered file."""

    def write(self, data: memoryview, /) -> int: ...


def wipe(data: bytes | bytearray | memoryview) -> None:
    """Zero the memory of `data`, even of immutable bytes.

    The caller must hold the only reference. Python shares bytes of length 1, so these are left
    unchanged.
    """
    if len(data) < 2:
        return
    if isinstance(data, bytes):
        ctypes.memset(data, 0, len(data))  # type: ignore[arg-type]  # their address
    else:
        ctypes.memset((ctypes.c_char * len(data)).from_buffer(data), 0, len(data))


def read_pieces(file: BinaryIO, piece_bytes: int = READ_BYTES) -> Iterator[memoryview]:
    """The rest of an unbuffered file. A piece is zeroed when the next one is read."""
    buffer = memoryview(bytearray(piece_bytes))
    try:
        while num_bytes := file.readinto(buffer):  # type: ignore[attr-defined]
            yield buffer[:num_bytes]
    finally:
        wipe(buffer)


def write_all(file: Writable, data: bytes | memoryview) -> None:
    """Write everything."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def file_digest(path: Path, algorithm: Callable[[], Any] = hashlib.sha256) -> Any:
    """The hash object of a file's content."""
    hasher = algorithm()
    with path.open("rb", buffering=0) as file:
        for piece in read_pieces(file):
            hasher.update(piece)
    return hasher
