"""The text of an API key, in base62 but for its prefix and separator:

    lpx_live_ <key id, 12> _ <secret, 32> <checksum, 6>

The prefix lets scanners find leaked keys; the checksum (CRC-32 of all before it) lets them and the
server drop made-up ones without a look-up. `TOKEN_PATTERN` is for scanners; the server parses by
position.
"""

from __future__ import annotations

import secrets
import string
import zlib
from dataclasses import dataclass, field

from ..errors import InvalidApiKey

PREFIX = "lpx_live_"
KEY_ID_LENGTH = 12
SECRET_LENGTH = 32
"""190 bits."""
CHECKSUM_LENGTH = 6
TOKEN_PATTERN = r"\blpx_live_[0-9A-Za-z]{12}_[0-9A-Za-z]{38}\b"

_BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
_BASE62_SET = frozenset(_BASE62)
_ID_END = len(PREFIX) + KEY_ID_LENGTH
_LENGTH = _ID_END + 1 + SECRET_LENGTH + CHECKSUM_LENGTH


@dataclass(frozen=True, slots=True)
class KeyToken:
    """A well-formed key. The text is a secret and does not appear in the repr."""

    key_id: str
    text: str = field(repr=False)


def make_token() -> KeyToken:
    """A new random key."""
    key_id = _random_base62(KEY_ID_LENGTH)
    body = f"{PREFIX}{key_id}_{_random_base62(SECRET_LENGTH)}"
    return KeyToken(key_id, body + _checksum(body))


def parse_token(text: str) -> KeyToken:
    """Take a key apart. Raises InvalidApiKey unless its form and checksum are right."""
    key_id, secret = text[len(PREFIX) : _ID_END], text[_ID_END + 1 :]
    is_well_formed = (
        len(text) == _LENGTH
        and text.startswith(PREFIX)
        and text[_ID_END] == "_"
        and _BASE62_SET.issuperset(key_id + secret)
        and _checksum(text[:-CHECKSUM_LENGTH]) == text[-CHECKSUM_LENGTH:]
    )
    if not is_well_formed:
        raise InvalidApiKey
    return KeyToken(key_id, text)


def _checksum(body: str) -> str:
    number = zlib.crc32(body.encode())
    digits = []
    for _ in range(CHECKSUM_LENGTH):
        number, digit = divmod(number, len(_BASE62))
        digits.append(_BASE62[digit])
    return "".join(reversed(digits))


def _random_base62(length: int) -> str:
    return "".join(secrets.choice(_BASE62) for _ in range(length))
