"""Messages between processes: length-prefixed JSON, checked against types when it is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import msgspec

MAX_MESSAGE_BYTES = 1 << 20
_LENGTH_BYTES = 4

MessageT = TypeVar("MessageT")


class MessageRefused(Exception):
    """The peer sent something that is not a message of this protocol."""


class Inbox:
    """Cuts the received bytes into messages."""

    def __init__(self) -> None:
        self._received = bytearray()

    def take(self, data: bytes) -> Iterator[bytes]:
        """Every message that is complete with `data`. Raises MessageRefused for one too long."""
        self._received += data
        while len(self._received) >= _LENGTH_BYTES:
            length = int.from_bytes(self._received[:_LENGTH_BYTES], "big")
            if length > MAX_MESSAGE_BYTES:
                raise MessageRefused(f"a message of {length} bytes")
            end = _LENGTH_BYTES + length
            if len(self._received) < end:
                return
            message = bytes(self._received[_LENGTH_BYTES:end])
            del self._received[:end]
            yield message


def in_frame(message: msgspec.Struct) -> bytes:
    """The message in its wire format."""
    content = msgspec.json.encode(message)
    assert len(content) <= MAX_MESSAGE_BYTES, "pages and texts are bounded"
    return len(content).to_bytes(_LENGTH_BYTES, "big") + content


def decode(decoder: msgspec.json.Decoder[MessageT], content: bytes) -> MessageT:
    """The message without its length. Raises MessageRefused."""
    try:
        return decoder.decode(content)
    except msgspec.DecodeError as exc:
        raise MessageRefused(str(exc)) from exc
