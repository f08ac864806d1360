"""The slots of open blocks, for KV formats that quantize complete blocks. Torch-free.

A block is open from its allocation until all of its tokens are final. While it is open, its vectors
are also kept as they were computed; see `kernels/kv_groups.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def num_open_slots(
    max_num_seqs: int, max_num_batched_tokens: int, block_size: int, *, num_steps: int
) -> int:
    """The open blocks that running sequences can have at once.

    A sequence has the block that it is in, and those that the tokens of `num_steps` steps fill:
    `t` tokens end at most `1 + t / block_size` blocks further. No other sequence has open blocks.
    """
    num_filled = -(-num_steps * max_num_batched_tokens // block_size)
    return 2 * max_num_seqs + num_filled


class OpenSlots:
    """Which blocks of a group are open, each in a slot of its own. Slot 0 is never given out."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots, 0, -1))
        self._slots: dict[int, int] = {}
        """By block id."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._slots

    def open(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """Slots for blocks with new content, of which there must be enough."""
        slots = tuple(self._free.pop() for _ in block_ids)
        self._slots.update(zip(block_ids, slots, strict=True))
        return slots

    def close(self, block_id: int) -> bool:
        """Give the block's slot back; False if it was not open."""
        slot = self._slots.pop(block_id, None)
        if slot is None:
            return False
        self._free.append(slot)
        return True

    def check_integrity(self, ref_count: Callable[[int], int]) -> None:
        """Assert that every slot is free or that of one block, which somebody holds."""
        slots = sorted([*self._free, *self._slots.values()])
        assert slots == list(range(1, self.num_slots + 1)), f"slots {slots} of {self.num_slots}"
        assert all(map(ref_count, self._slots)), "an open block has no holder"
