"""Bytes that may be spent on something, shared by many who spend them."""

from __future__ import annotations


class ByteBudget:
    """Not thread-safe: the engine's loop spends and gives back."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0

    def take(self, num_bytes: int) -> bool:
        """Spend so much, or nothing and False if it is not left."""
        if self.used_bytes + num_bytes > self.max_bytes:
            return False
        self.used_bytes += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        assert num_bytes <= self.used_bytes, "more is given back than was taken"
        self.used_bytes -= num_bytes
