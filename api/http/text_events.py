"""Stream events that differ only in their text."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from .sse import on_one_line

_encode = msgspec.json.Encoder().encode
_TEXT = "\0text\0"
"""The placeholder of the text; no event contains these characters otherwise."""


class TextEvents:
    """Makes the events of one choice: byte for byte those of `make`, at a fraction of the cost."""

    def __init__(self, make: Callable[[str], bytes]) -> None:
        """`make` returns the event of a text, in which the text occurs once, as JSON."""
        self._head, self._tail = make(_TEXT).split(_encode(_TEXT))

    def event(self, text: str) -> bytes:
        encoded = _encode(text)
        if not encoded.isascii():
            encoded = on_one_line(encoded)
        return b"".join((self._head, encoded, self._tail))
