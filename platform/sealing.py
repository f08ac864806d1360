"""Encrypts data that is kept in the database, under a key for one purpose.

AES-256-GCM with a random nonce before the ciphertext. Data is bound to its context, such as the
row's key: moved to another row it cannot be decrypted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from .secrets import derive_key

_NONCE_BYTES = 12


class Seal:
    """Encrypts under the server's present secret, and decrypts under all of them."""

    def __init__(self, secrets: Sequence[bytes], label: str) -> None:
        """`secrets`: the present one first; `label` names the purpose."""
        self._ciphers = [AESGCM(derive_key(secret, label)) for secret in secrets]

    def close(self, content: bytes, context: bytes) -> bytes:
        """The content, encrypted."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._ciphers[0].encrypt(nonce, content, context)

    def open(self, sealed: bytes, context: bytes) -> bytes | None:
        """The content; None if it was encrypted under another secret or for another context."""
        nonce, ciphertext = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        for cipher in self._ciphers:
            with suppress(InvalidTag):
                return cipher.decrypt(nonce, ciphertext, context)
        return None
