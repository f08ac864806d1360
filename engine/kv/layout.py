"""The division of KV memory into groups, and the queued operations on blocks between steps.

Torch-free: the scheduler queues operations, and the tensor code executes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...adapters.identity import AdapterKey
from ...kernels.attention_window import AttentionWindow
from .prefix_cache import Prefix

STATE_WINDOW = AttentionWindow(2)
"""Of a group of states: the next token is computed with the state after the one before it."""


_SLOT_ALIGNMENT = 8
"""Elements of every dtype begin at multiples of their size."""


def shared_slot_bytes(block_bytes: int) -> int:
    """Bytes of a host slot for blocks of so many bytes, in memory that others share."""
    return -(-block_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """The number of blocks for a number of tokens."""
    return -(-num_tokens // block_size)


def whole_blocks(start: int, num_tokens: int, block_size: int) -> int:
    """How many of the tokens from `start` on a step may compute that computes no tokens of an
    unfinished block together with others."""
    end = start + num_tokens
    if start % block_size:
        return min(num_tokens, block_size - start % block_size)
    return end // block_size * block_size - start or num_tokens


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers with one block table and one pool, whose entries are kept and freed together."""

    layers: tuple[int, ...]
    window: AttentionWindow | None
    """The positions that a query sees; None: all."""
    sinks: int
    """The number of first positions that remain visible outside the window; 0 without a window."""
    num_blocks: int
    """Includes the null block."""
    holds_states: bool = False
    """A block holds the layers' states after the last computed one of its tokens, instead of an
    entry for each token."""
    num_more: int = 0
    """Further blocks that the pool may get while it serves, from the adapters' memory."""
    num_less: int = 0
    """Blocks that the pool may lose while it serves, to the adapters' memory."""
    gives_end: bool = False
    """Only the last blocks can be lost, because adapters get the same addresses; see
    `DividedMemory`."""

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def may_move(self) -> bool:
        """Whether blocks come and go while the pool serves."""
        return bool(self.num_more or self.num_less)

    @property
    def num_reserved(self) -> int:
        """Blocks with an address, and the null block."""
        return self.num_blocks + self.num_more

    def num_sink_blocks(self, block_size: int) -> int:
        return num_blocks_for(self.sinks, block_size)

    def first_visible_block(self, num_computed: int, block_size: int) -> int:
        """The first block that the query after `num_computed` tokens sees, without sinks."""
        if self.window is None:
            return 0
        return max(self.window.first_visible(num_computed), 0) // block_size

    def first_kept_block(self, num_computed: int, block_size: int) -> int:
        """The first block that a sequence of `num_computed` tokens keeps, without sinks.

        It keeps one position more than it needs, because a fork may compute the prompt's last token
        again.
        """
        return self.first_visible_block(num_computed - 1, block_size)

    def peak_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """The maximum number of blocks that a sequence holds until it has `num_tokens`, with
        `chunk` tokens per step."""
        blocks = num_blocks_for(num_tokens, block_size)
        if self.window is None:
            return blocks
        if self.holds_states:
            return min(blocks, 2)  # that which is read and that which is written
        num_visible = (self.window.size + chunk - 2) // block_size + 2  # for any border of it
        return min(blocks, self.num_sink_blocks(block_size) + num_visible)


@dataclass(frozen=True, slots=True)
class ZeroBlocks:
    """Clear blocks that have a new owner."""

    group: int
    block_ids: tuple[int, ...]
    open_slots: tuple[int, ...] = ()
    """The slots in which these blocks are open, if complete blocks are quantized."""


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """Give a sequence its own copy of a block that others also hold (copy-on-write)."""

    group: int
    source: int
    target: int
    open_slot: int | None = None
    """The slot in which the target is open, as the source is; None: they have none."""


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copy blocks to the host."""

    group: int
    block_ids: tuple[int, ...]
    host_slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Copy blocks from the host."""

    group: int
    host_slots: tuple[int, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ToDisk:
    """Begin to write a prefix to the disk. Its content is copied at once."""

    group: int
    source: int
    """The block, or the host slot."""
    is_on_host: bool
    disk_slot: int
    prefix: Prefix


@dataclass(frozen=True, slots=True)
class FromDisk:
    """Begin to read a prefix from the disk into a host slot."""

    group: int
    disk_slot: int
    host_slot: int
    prefix: Prefix


@dataclass(frozen=True, slots=True)
class EraseOnDisk:
    """Begin to erase an adapter's prefixes on the disk."""

    adapter: AdapterKey


@dataclass(frozen=True, slots=True)
class GiveBackBlocks:
    """Return the memory of blocks that are out of use, and read as zeros from now on."""

    group: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RestoreBlocks:
    """Blocks whose memory was returned are in use again."""

    group: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GiveUpSlots:
    """Let these host slots, which are out of use, have the places from `first_place` on, whose
    memory others get. What is there moves to the places that these slots had, and leaves zeros."""

    group: int
    host_slots: tuple[int, ...]
    first_place: int


KvOperation = (
    ZeroBlocks
    | CopyBlock
    | SwapOut
    | SwapIn
    | GiveBackBlocks
    | RestoreBlocks
    | GiveUpSlots
    | ToDisk
    | FromDisk
    | EraseOnDisk
)
"""Executed in the order in which they were queued, before the step's forward pass."""


class OperationLog:
    """The operations that wait for the next forward, in the order in which they were decided.

    Zeros commute with one another: those of a group are gathered up to the next other operation.
    So are the copies of evicted prefixes. They go before the zeros, because their blocks are zeroed
    for new owners and no block that waits to be zeroed holds a prefix.
    """

    def __init__(self) -> None:
        self._operations: list[KvOperation] = []
        self._to_keep: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """By group and host slot, the blocks to copy after all of `_operations`."""
        self._to_zero: defaultdict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        """By group, the blocks to clear after these copies, and their open slots."""
        self.before_take: Callable[[], None] | None = None
        """Adds copies to the disk."""

    def keep(self, group: int, block_id: int, host_slot: int) -> None:
        """Copy an evicted prefix to the host before its block is given other content, or the null
        block over a prefix on the host that is deleted."""
        self._to_keep[group][host_slot] = block_id

    def zero(self, group: int, block_ids: Sequence[int], open_slots: Sequence[int] = ()) -> None:
        if block_ids:
            all_ids, all_slots = self._to_zero[group]
            all_ids += block_ids
            all_slots += open_slots

    def add(self, operation: KvOperation) -> None:
        self._flush()
        self._operations.append(operation)

    @property
    def is_empty(self) -> bool:
        """Whether no operation waits."""
        return not (self._operations or self._to_keep or self._to_zero)

    def take(self) -> list[KvOperation]:
        """Hand out the log, which is empty afterwards."""
        if self.before_take:
            self.before_take()
        if self._to_zero or self._to_keep:
            self._flush()
        operations, self._operations = self._operations, []
        return operations

    def _flush(self) -> None:
        for group, kept in self._to_keep.items():
            self._operations.append(SwapOut(group, tuple(kept.values()), tuple(kept)))
        self._to_keep.clear()
        for group, (block_ids, slots) in self._to_zero.items():
            self._operations.append(ZeroBlocks(group, tuple(block_ids), tuple(slots)))
        self._to_zero.clear()
