"""The pages of a simulated device, in the place of `ModelRunner` for `PrefixHandover`."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.engine.kv.layout import KvOperation
from simulation.device import FakeDevice

BYTES_PER_VALUE = 9
"""Values have 64 bits, and one is negative."""


class SimulatedPages:
    """Each group has one tensor, and a page holds the values of its blocks one after the other."""

    def __init__(self, device: FakeDevice, block_size: int) -> None:
        self._device = device
        self._block_size = block_size

    def execute_at_rest(self, operations: Sequence[KvOperation]) -> None:
        self._device.launch_operations(operations)
        self._device.flush()

    def read_blocks(self, group: int, block_ids: Sequence[int]) -> list[bytes]:
        self._device.flush()
        values = [value for each in block_ids for value in self._device.block(group, each)]
        return [b"".join(value.to_bytes(BYTES_PER_VALUE, signed=True) for value in values)]

    def are_pages(self, group: int, num_blocks: int, pages: Sequence[bytes]) -> bool:
        return [len(page) for page in pages] == [num_blocks * self._bytes_per_block]

    def write_host(self, group: int, slots: Sequence[int | None], pages: Sequence[bytes]) -> None:
        (page,) = pages
        for index, slot in enumerate(slots):
            if slot is not None:
                start = index * self._bytes_per_block
                block = page[start : start + self._bytes_per_block]
                self._device.slots[group][slot] = _values_of(block)

    @property
    def _bytes_per_block(self) -> int:
        return self._block_size * BYTES_PER_VALUE


def _values_of(block: bytes) -> list[int]:
    return [
        int.from_bytes(block[start : start + BYTES_PER_VALUE], signed=True)
        for start in range(0, len(block), BYTES_PER_VALUE)
    ]
