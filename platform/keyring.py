"""The keys of one purpose, derived from the server's secrets: the current one signs, all verify.

To replace a secret, set a new one and keep the old one as a previous secret. Signed data names its
secret, so no secret is tried in vain.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from .secrets import derive_key

SECRET_ID_LENGTH = 8
_SECRET_ID = "secret-id"


def secret_id(secret: bytes) -> str:
    """The id of a secret, stored with what it signed; reveals nothing about the secret."""
    return derive_key(secret, _SECRET_ID)[: SECRET_ID_LENGTH // 2].hex()


class Keyring:
    """HMAC-SHA256 under keys derived for one purpose."""

    def __init__(self, secrets: Sequence[bytes], label: str) -> None:
        """`secrets`: the present one first; `label` names the purpose."""
        self._keys = {secret_id(secret): derive_key(secret, label) for secret in secrets}
        self.current_id = secret_id(secrets[0])
        """The present secret's."""

    def mac(self, message: bytes, under: str) -> bytes | None:
        """The message's code under the secret of this id; None if the server does not have it."""
        key = self._keys.get(under)
        return None if key is None else hmac.digest(key, message, hashlib.sha256)

    def sign(self, message: bytes) -> bytes:
        """The message's code under the present secret."""
        return hmac.digest(self._keys[self.current_id], message, hashlib.sha256)

    def is_signed(self, message: bytes, mac: bytes, under: str) -> bool:
        """Whether the code is the message's. A forged code takes the same time."""
        return hmac.compare_digest(mac, self.mac(message, under) or b"")

    def age(self, under: str) -> int | None:
        """0 for the present secret, more for earlier ones; None if the server does not have it."""
        return list(self._keys).index(under) if under in self._keys else None
