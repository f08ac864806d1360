"""The key of the prefixes on disk, and what is derived from it. Torch-free."""

from __future__ import annotations

import hashlib
import secrets

TIER_KEY_BYTES = 32


def new_tier_key() -> bytes:
    """The key of a tier that ends with its owner."""
    return secrets.token_bytes(TIER_KEY_BYTES)


def hash_secret(tier_key: bytes) -> bytes:
    """The secret of the prefix cache's hashes, so that a restart finds prefixes by the same
    keys."""
    return hashlib.blake2b(b"prefix hashes", key=tier_key, digest_size=32).digest()
