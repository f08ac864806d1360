"""Argon2id password hashes, which make guessing as expensive as verifying."""

from __future__ import annotations

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from argon2.low_level import Type

MIN_PASSWORD_LENGTH = 12
MAX_PASSWORD_LENGTH = 1024
MEMORY_KIB = 64 << 10
"""For each hash while it is computed; the setting is RFC 9106's second choice with one lane."""
NUM_PASSES = 3


class Passwords:
    """Computes and compares hashes: a fraction of a second each, so never on the event loop."""

    def __init__(self, *, memory_kib: int = MEMORY_KIB, num_passes: int = NUM_PASSES) -> None:
        self._hasher = PasswordHasher(
            time_cost=num_passes, memory_cost=memory_kib, parallelism=1, type=Type.ID
        )
        self._unknown_user_hash = self._hasher.hash("password of an unknown user")

    def hash(self, password: str) -> str:
        """The stored hash of a password, including its salt."""
        return self._hasher.hash(password)

    def is_password(self, password: str, stored: str | None) -> bool:
        """Whether the stored hash is this password's. Takes the same time if nothing is stored."""
        try:
            self._hasher.verify(stored or self._unknown_user_hash, password)
        except (VerificationError, InvalidHashError):
            return False
        return stored is not None
