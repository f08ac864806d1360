"""Reads connections without leaving bytes of an uploaded adapter in this process's memory.

The event loop's own read buffer keeps the last bytes it read, and freed `bytes` keep their content.
Therefore connections are read into one buffer that is zeroed after each read, and objects created
from it on the way to the application are zeroed after use (decision 35).
"""

from __future__ import annotations

import asyncio

from ...adapters.wiping import wipe

READ_BYTES = 256 << 10

# One buffer for all connections: the loop delivers each read before the next.
_buffer = memoryview(bytearray(READ_BYTES))
_zeros = memoryview(bytes(READ_BYTES))


class WipedReads(asyncio.BufferedProtocol):
    """A layer between the transport and a protocol, which receives views that are zeroed
    afterwards."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol

    def get_buffer(self, sizehint: int) -> memoryview:
        return _buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = _buffer[:nbytes]
        try:
            self._protocol.data_received(data)  # type: ignore[arg-type]  # parsers take any buffer
        finally:
            data[:] = _zeros[:nbytes]

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)


class WipedBody:
    """The received part of a body; replaces the `bytearray` of uvicorn's request cycle."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def __iadd__(self, piece: bytes) -> WipedBody:
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        return self

    def __len__(self) -> int:
        return self._num_bytes

    def __bytes__(self) -> bytes:
        """The whole body, once; the caller must wipe the result."""
        if len(self._pieces) == 1:
            return self._pieces.pop()
        joined = b"".join(self._pieces)
        self._wipe()
        return joined

    def __del__(self) -> None:
        self._wipe()

    def _wipe(self) -> None:
        while self._pieces:
            wipe(self._pieces.pop())
