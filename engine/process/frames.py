"""Length-prefixed frames on a byte stream."""

from __future__ import annotations

import struct
from collections.abc import Sequence

Frames = Sequence[bytes]
"""The number of frames per message: a name and a payload, see `transport`."""
_HEADER = struct.Struct("<II")


def pack(frames: Frames) -> bytes:
    name, payload = frames
    return b"".join((_HEADER.pack(len(name), len(payload)), name, payload))


class FrameReader:
    """Splits received bytes into messages."""

    def __init__(self) -> None:
        self._received = bytearray()

    def add(self, data: bytes) -> None:
        """Add received bytes."""
        self._received += data

    def next(self) -> Frames | None:
        """The next message; None while it is incomplete."""
        received = self._received
        if len(received) < _HEADER.size:
            return None
        name_bytes, payload_bytes = _HEADER.unpack_from(received)
        begin = _HEADER.size + name_bytes
        end = begin + payload_bytes
        if len(received) < end:
            return None
        frames = bytes(received[_HEADER.size : begin]), bytes(received[begin:end])
        del received[:end]
        return frames

    def __bool__(self) -> bool:
        """Whether an incomplete message remains."""
        return bool(self._received)
