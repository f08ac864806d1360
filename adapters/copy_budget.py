"""Byte budget for copies of adapters' matrices outside the arena, and the copies to erase.

Kernels that keep such copies take bytes from this budget. When an adapter is evicted, they hand
over its copies, which are zeroed together with the adapter's extent, outside the steps.
"""

from __future__ import annotations

from torch import Tensor


class CopyBudget:
    """Not thread-safe: the engine's loop calls everything."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._discarded: list[Tensor] = []

    def take(self, num_bytes: int) -> bool:
        """Take this many bytes; False, without effect, if fewer are left."""
        if self.used_bytes + num_bytes > self.max_bytes:
            return False
        self.used_bytes += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        assert num_bytes <= self.used_bytes, "more is given back than was taken"
        self.used_bytes -= num_bytes

    def discard(self, values: Tensor) -> None:
        """Register a copy of a removed adapter's matrices that must be zeroed."""
        self._discarded.append(values)

    def take_discarded(self) -> list[Tensor]:
        """The copies discarded since the last call. The caller zeroes them."""
        discarded, self._discarded = self._discarded, []
        return discarded
