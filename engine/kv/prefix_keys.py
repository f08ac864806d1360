"""The keys that encrypt cached prefixes on disk: one for each adapter of a tenant, and its bases.

Each is a file, encrypted under the tier's key. No key is kept in memory: when its file is erased,
by whatever process, its prefixes are unreadable from then on. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from .key_files import SUFFIX, erase_files

KEY_BYTES = 32
NONCE_BYTES = 12
MAX_NAME_LENGTH = 200
"""Of a key that is stored: a composition of more adapters has a longer one."""


class PrefixKeys:
    """The key files in one folder."""

    def __init__(self, directory: Path, tier_key: bytes) -> None:
        """Raises OSError."""
        self._directory = directory
        self._cipher = AESGCM(tier_key)
        directory.mkdir(mode=0o700, exist_ok=True)

    def names(self) -> Iterator[str]:
        """Those of all keys."""
        return (path.stem for path in self._directory.glob(f"*{SUFFIX}"))

    def load(self, name: str) -> bytes | None:
        """The key of this name; None: it was erased, or encrypted under another tier key. Raises
        OSError."""
        try:
            sealed = self._path(name).read_bytes()
            return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], name.encode())
        except (FileNotFoundError, InvalidTag, ValueError):
            return None

    def load_or_create(self, name: str) -> bytes:
        """Raises OSError."""
        if (key := self.load(name)) is not None:
            return key
        key, nonce = os.urandom(KEY_BYTES), os.urandom(NONCE_BYTES)
        partial = self._path(name).with_suffix(".partial")
        partial.touch(mode=0o600)
        partial.write_bytes(nonce + self._cipher.encrypt(nonce, key, name.encode()))
        partial.replace(self._path(name))
        return key

    def remove(self, names: Iterable[str]) -> None:
        """Erase keys. Raises OSError."""
        erase_files(self._directory, map(self._path, names))

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}{SUFFIX}"
