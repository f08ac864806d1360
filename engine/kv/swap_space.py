"""Host memory for the blocks of preempted sequences.

Torch-free: it counts slots; the runner owns the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable


class SwapSpace:
    """The host slots of one group of layers. Each slot stores one block."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        assert count <= len(self._free), "the caller asks num_free first"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, slots: Iterable[int]) -> None:
        self._free.extend(slots)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that every slot is free or has exactly one holder."""
        slots = sorted([*self._free, *held])
        assert slots == list(range(self.num_slots)), f"slots {slots} of {self.num_slots}"
