"""Length-prefixed frames on a byte stream, with bounded lengths."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ..errors import MalformedMessage

Frames = Sequence[bytes]
"""The frames of a message: a name and a payload, see `transport`."""

MAX_NAME_BYTES = 64
MAX_PAYLOAD_BYTES = 64 << 20
"""Three times the largest message: a request of 4 Mi tokens, the most that a body holds, is 20 MiB
long."""
_HEADER = struct.Struct("<II")
MAX_MESSAGE_BYTES = _HEADER.size + MAX_NAME_BYTES + MAX_PAYLOAD_BYTES


def pack(frames: Frames) -> bytes:
    """The bytes of a message. Raises MalformedMessage if no reader would accept its lengths."""
    name, payload = frames
    _check_lengths(len(name), len(payload))
    return b"".join((_HEADER.pack(len(name), len(payload)), name, payload))


class FrameReader:
    """Splits received bytes into messages.

    Whoever takes all complete messages after each `add` holds less than MAX_MESSAGE_BYTES and what
    was added last, whatever a peer sends.
    """

    def __init__(self) -> None:
        self._received = bytearray()

    def add(self, data: bytes) -> None:
        """Add received bytes."""
        self._received += data

    def next(self) -> Frames | None:
        """The next message; None while it is incomplete.

        Raises MalformedMessage as soon as a length exceeds its bound. The stream has no message
        after that, and the connection must end.
        """
        received = self._received
        if len(received) < _HEADER.size:
            return None
        name_bytes, payload_bytes = _HEADER.unpack_from(received)
        _check_lengths(name_bytes, payload_bytes)
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


def _check_lengths(name_bytes: int, payload_bytes: int) -> None:
    if name_bytes > MAX_NAME_BYTES:
        raise MalformedMessage(f"a name of {name_bytes} bytes; at most {MAX_NAME_BYTES}")
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise MalformedMessage(f"a payload of {payload_bytes} bytes; at most {MAX_PAYLOAD_BYTES}")
