"""What it takes to move KV blocks between device and host. Torch-free."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from ..kv.block_pool import NULL_BLOCK
from ..kv.layout import KvOperation, SwapIn, SwapOut
from ..kv.sequence_blocks import SequenceBlocks
from .step_costs import StepCosts


class SwapCosts:
    """Learns from the swaps of each step."""

    def __init__(self, costs: StepCosts, block_bytes: tuple[int, ...]) -> None:
        """`block_bytes`: per KV group; empty: nothing is known, and swapping is free."""
        self._costs = costs
        self._block_bytes = block_bytes

    def observe(self, operations: Iterable[KvOperation], seconds: float) -> None:
        """So long the swaps among these operations took."""
        num_bytes = sum(
            self._bytes(operation.group, len(operation.block_ids))
            for operation in operations
            if isinstance(operation, SwapIn | SwapOut)
        )
        if num_bytes and seconds > 0:
            self._costs.observe_swap(num_bytes, seconds)

    def round_trip_seconds(self, seq: SequenceBlocks) -> float:
        """Moving all that a sequence has on the device to the host and back."""
        num_bytes = sum(
            self._bytes(group, int((table != NULL_BLOCK).sum()))
            for group, table in enumerate(seq.tables)
        )
        return 2 * self._costs.swap_seconds(num_bytes)

    def pays_to_fetch(self, num_tokens: int, num_blocks: Sequence[int]) -> bool:
        """Whether copying so many blocks per group from the host is as fast as computing the
        tokens."""
        num_bytes = sum(itertools.starmap(self._bytes, enumerate(num_blocks)))
        seconds = self.compute_seconds(num_tokens)
        return seconds is None or self._costs.swap_seconds(num_bytes) <= seconds

    def observe_read(self, num_bytes: int, seconds: float) -> None:
        """So long the disk took for these bytes."""
        self._costs.observe_read(num_bytes, seconds)

    def pays_to_read(self, num_tokens: int, num_blocks: Sequence[int]) -> bool:
        """Whether reading so many blocks per group from the disk, and copying them to the device,
        is as fast as computing the tokens; also while nothing is known about computing."""
        num_bytes = sum(itertools.starmap(self._bytes, enumerate(num_blocks)))
        seconds = self._costs.read_seconds(num_bytes) + self._costs.swap_seconds(num_bytes)
        compute_seconds = self.compute_seconds(num_tokens)
        return compute_seconds is None or seconds <= compute_seconds

    def compute_seconds(self, num_tokens: int) -> float | None:
        """What computing these tokens takes; None: nothing is known about it."""
        if not self._costs.knows_prompts:
            return None
        return self._costs.recompute_seconds(num_tokens)

    def _bytes(self, group: int, num_blocks: int) -> int:
        return num_blocks * self._block_bytes[group] if self._block_bytes else 0
