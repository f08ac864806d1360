"""A part of an upload in the store."""

from __future__ import annotations

from typing import NamedTuple

MAX_PARTS = 2048
"""Of one upload: its row has an entry for each. The largest adapter in parts of 2 MiB."""


class UploadPart(NamedTuple):
    """Bytes that one request sent, as an object of their own."""

    id: str
    size_bytes: int
    sha256: str
    """64 hexadecimal digits."""
