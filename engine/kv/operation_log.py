"""The queued operations on KV tensors before the next forward pass. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable

from .layout import KvOperation, ZeroBlocks


class OperationLog:
    """Operations in the order of their decision.

    Zeroing operations commute, so those of a group are collected until the next other operation.
    """

    def __init__(self, num_groups: int) -> None:
        self._operations: list[KvOperation] = []
        self._to_zero: list[list[int]] = [[] for _ in range(num_groups)]
        """The blocks of each group to zero after all of `_operations`."""

    def zero(self, group: int, block_ids: Iterable[int]) -> None:
        self._to_zero[group] += block_ids

    def add(self, operation: KvOperation) -> None:
        self._flush_zeros()
        self._operations.append(operation)

    def take(self) -> list[KvOperation]:
        """Return the operations and empty the log."""
        self._flush_zeros()
        operations, self._operations = self._operations, []
        return operations

    def _flush_zeros(self) -> None:
        for group, block_ids in enumerate(self._to_zero):
            if block_ids:
                self._operations.append(ZeroBlocks(group, tuple(block_ids)))
                self._to_zero[group] = []
