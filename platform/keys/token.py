"""The text format of an API key, in base62 except for its prefix and separator:

    lpx_live_ <key id, 12> _ <secret, 32> <checksum, 6>

An operator's key starts with `lpx_admin_` instead. The prefix lets scanners find leaked keys. The
checksum (CRC-32 of everything before it) lets scanners and the server reject invented keys without
a look-up. `TOKEN_PATTERN` is for scanners; the server parses by position.
"""

from __future__ import annotations

import secrets
import string
import zlib
from dataclasses import dataclass, field

from ..errors import InvalidApiKey

TENANT_PREFIX = "lpx_live_"
OPERATOR_PREFIX = "lpx_admin_"
KEY_ID_LENGTH = 12
SECRET_LENGTH = 32
"""190 bits."""
CHECKSUM_LENGTH = 6
TOKEN_PATTERN = r"\blpx_(live|admin)_[0-9A-Za-z]{12}_[0-9A-Za-z]{38}\b"

_BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
_BASE62_SET = frozenset(_BASE62)
_REST_LENGTH = KEY_ID_LENGTH + 1 + SECRET_LENGTH + CHECKSUM_LENGTH


@dataclass(frozen=True, slots=True)
class KeyToken:
    """A well-formed key. The text is a secret and does not appear in the repr."""

    key_id: str
    text: str = field(repr=False)


def is_operators(text: str) -> bool:
    """Whether it can only be an operator's key, not a tenant's."""
    return text.startswith(OPERATOR_PREFIX)


def make_token(prefix: str = TENANT_PREFIX) -> KeyToken:
    """A new random key."""
    key_id = _random_base62(KEY_ID_LENGTH)
    body = f"{prefix}{key_id}_{_random_base62(SECRET_LENGTH)}"
    return KeyToken(key_id, body + _checksum(body))


def parse_token(text: str) -> KeyToken:
    """Take a key apart. Raises InvalidApiKey unless its form and checksum are right."""
    prefix = OPERATOR_PREFIX if is_operators(text) else TENANT_PREFIX
    rest = text.removeprefix(prefix)
    key_id, separator, secret = (
        rest[:KEY_ID_LENGTH],
        rest[KEY_ID_LENGTH : KEY_ID_LENGTH + 1],
        rest[KEY_ID_LENGTH + 1 :],
    )
    is_well_formed = (
        text.startswith(prefix)
        and len(rest) == _REST_LENGTH
        and separator == "_"
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
