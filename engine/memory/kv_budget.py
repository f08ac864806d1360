"""Computes the number of blocks per KV group for a number of bytes. Torch-free."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import EngineConfig
from ..kv.layout import KvGroup

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KvDemand:
    """The demand of one KV group."""

    config: EngineConfig
    group: KvGroup
    bytes_per_block: int
    max_model_len: int
    num_open_slots: int | None = None
    """Blocks that can be open at once, if complete blocks are quantized."""
    bytes_per_open_slot: int = 0

    @property
    def open_bytes(self) -> int:
        """Bytes of open blocks, and of the slot to which padding writes."""
        if self.num_open_slots is None:
            return 0
        return (1 + self.num_open_slots) * self.bytes_per_open_slot

    @property
    def sees_all(self) -> bool:
        return self.group.window is None

    @property
    def least(self) -> int:
        """The blocks without which the longest sequence could not run even alone, one block per
        step.

        A length that the operator did not set is shortened instead, if the group must hold all of
        it.
        """
        is_negotiable = self.sees_all and self.config.max_model_len is None
        return 1 if is_negotiable else self._peak(self.max_model_len)

    def held(self, num_tokens: int) -> int:
        """The blocks of a sequence of `num_tokens` tokens that runs alone, one block per step."""
        return self._peak(num_tokens)

    def wanted(self, num_tokens: int) -> int:
        """Blocks of a full batch of sequences of `num_tokens` tokens, amid a step of prefill."""
        config, size = self.config, self.config.kv_block_size
        blocks = config.max_num_seqs * -(-num_tokens // size)
        if self.sees_all:
            return blocks
        held = config.max_num_seqs * self._peak(num_tokens)
        if self.group.holds_states:
            return min(blocks, held + config.max_num_seqs)  # and a snapshot for each
        return min(blocks, held + -(-config.max_num_batched_tokens // size))

    def line(self, num_blocks: int) -> str:
        """The text for the operator."""
        group, size = self.group, self.config.kv_block_size
        if group.holds_states:
            return (
                f"states of {len(group.layers)} layers {num_blocks} blocks, {self.bytes_per_block} "
                f"bytes each: {num_blocks * self.bytes_per_block / MIB:.1f} MiB for "
                f"{num_blocks // self._peak(self.max_model_len)} sequences of any length"
            )
        line = (
            f"KV cache {num_blocks} blocks of {size} tokens, {self.bytes_per_block} bytes each: "
            f"{num_blocks * self.bytes_per_block / MIB:.1f} MiB for "
        )
        if self.num_open_slots is not None:
            line = (
                f"unfinished KV blocks {self.num_open_slots} of {size} tokens, "
                f"{self.bytes_per_open_slot} bytes each: {self.open_bytes / MIB:.1f} MiB; {line}"
            )
        if self.sees_all:
            return line + f"{num_blocks * size} tokens"
        sinks = f" and {group.sinks} first ones" if group.sinks else ""
        return line + (
            f"{len(group.layers)} layers that see {group.window} tokens{sinks}: "
            f"{num_blocks // self._peak(self.max_model_len)} sequences of any length"
        )

    def _peak(self, num_tokens: int) -> int:
        size = self.config.kv_block_size
        return self.group.peak_blocks(num_tokens, size, size)


def divide_kv(kv_bytes: int, demands: Sequence[KvDemand]) -> list[int] | None:
    """Blocks per group, such that no group is exhausted long before the others; None: too few
    bytes.

    Every group gets the need of a full batch of equally long sequences, as long as possible.
    Full-attention layers get the rest.
    """
    lengths = range(1, demands[0].max_model_len + 1)
    fitting = bisect_right(lengths, kv_bytes, key=lambda length: wanted_bytes(demands, length))
    wanted = [demand.wanted(max(1, fitting)) for demand in demands]
    scale = kv_bytes / kv_bytes_of(demands, wanted)
    if any(demand.sees_all for demand in demands):
        scale = min(1.0, scale)
    least = [demand.least for demand in demands]
    scaled = [max(few, int(many * scale)) for few, many in zip(least, wanted, strict=True)]
    for windowed in (scaled, least):
        counts = _give_the_rest(kv_bytes, demands, windowed)
        if kv_bytes_of(demands, counts) <= kv_bytes and all(
            count >= few for count, few in zip(counts, least, strict=True)
        ):
            return counts
    return None


def _give_the_rest(
    kv_bytes: int, demands: Sequence[KvDemand], windowed: Sequence[int]
) -> list[int]:
    """`windowed` blocks for layers with a window; the rest for full-attention layers."""
    taken = sum(
        demand.bytes_per_block * count
        for demand, count in zip(demands, windowed, strict=True)
        if not demand.sees_all
    )
    return [
        max(0, kv_bytes - taken) // demand.bytes_per_block if demand.sees_all else count
        for demand, count in zip(demands, windowed, strict=True)
    ]


def divide_swap(
    swap_bytes: int, demands: Sequence[KvDemand], num_blocks: Sequence[int]
) -> tuple[int, ...]:
    """Host slots per group, in the proportion in which the device holds blocks; empty: none."""
    total = kv_bytes_of(demands, num_blocks)
    if not swap_bytes:
        return ()
    return tuple(count * swap_bytes // total for count in num_blocks)


def open_bytes_of(demands: Sequence[KvDemand]) -> int:
    """Bytes of the open blocks of all groups."""
    return sum(demand.open_bytes for demand in demands)


def wanted_bytes(demands: Sequence[KvDemand], num_tokens: int) -> int:
    """The bytes of a full batch of sequences with `num_tokens` tokens, without open blocks."""
    return kv_bytes_of(demands, [demand.wanted(num_tokens) for demand in demands])


def kv_bytes_of(demands: Sequence[KvDemand], num_blocks: Sequence[int]) -> int:
    return sum(
        demand.bytes_per_block * count for demand, count in zip(demands, num_blocks, strict=True)
    )
