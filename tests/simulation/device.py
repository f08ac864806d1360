"""A simulated device: the contents of each cell of the KV cache, and the duration of steps.

It executes operations and steps in the order in which they were launched, and as late as it can:
when somebody waits for a step. Bookkeeping errors show in reads and writes, so both are checked.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from random import Random
from typing import NamedTuple, assert_never

from loraplex.engine.kv.layout import (
    CopyBlock,
    EraseOnDisk,
    FromDisk,
    GiveBackBlocks,
    GiveUpSlots,
    KvGroup,
    KvOperation,
    RestoreBlocks,
    SwapIn,
    SwapOut,
    ToDisk,
    ZeroBlocks,
)
from loraplex.engine.scheduling.step_costs import StepShape

from .contents import ZERO, is_foreign
from .disk import FakeDisk
from .violation import Invariant, require


class StepSeconds(NamedTuple):
    """What a step of this device takes."""

    base: float
    per_prefill_token: float
    per_decode: float
    per_context_token: float
    per_draft_token: float

    def of(self, shape: StepShape, rng: Random) -> float:
        seconds = (
            self.base
            + self.per_prefill_token * shape.num_prefill_tokens
            + self.per_decode * shape.num_decodes
            + self.per_context_token * shape.num_context_tokens
            + self.per_draft_token * shape.num_draft_tokens
        )
        return seconds * rng.uniform(0.9, 1.2)


class Computed(NamedTuple):
    """A sequence of a step."""

    name: str
    owner: int
    tables: Sequence[Sequence[int]]
    """By group, those with which the step was launched."""
    start: int
    """The place of its first token."""
    before: Sequence[int] | None
    """The values of the places before `start`; None: they were not finite."""
    values: Sequence[int]
    """Those of its tokens, known, pending and draft tokens."""
    targets: Sequence[Sequence[int]] = ()
    """By group, where the step moves the last tokens that it keeps; empty: it does not compact."""
    num_kept: int = 0


Place = tuple[type[SwapIn | SwapOut], int, int]
"""A block that is swapped in or copied to, or a host slot to which one is swapped out, and its
group."""


def moved(operations: Iterable[KvOperation]) -> Counter[Place]:
    """The blocks and host slots that these swaps and copies fill."""
    filled: Counter[Place] = Counter()
    for operation in operations:
        match operation:
            case SwapIn(group, _, block_ids):
                filled.update((SwapIn, group, block_id) for block_id in block_ids)
            case CopyBlock(group, _, target):
                filled[SwapIn, group, target] += 1
            case SwapOut(group, _, host_slots):
                filled.update((SwapOut, group, slot) for slot in host_slots)
    return filled


class FakeDevice:
    """KV cells per group, in blocks, and host slots behind them."""

    def __init__(
        self,
        groups: Sequence[KvGroup],
        block_size: int,
        disk: FakeDisk | None = None,
        *,
        has_stages: bool = False,
    ) -> None:
        """`has_stages`: it is the last of a pipeline, and blocks take memory until it executes
        what gives them back. Else its memory changes in the order of the launches."""
        self._disk = disk
        if disk is not None:
            disk.flush = self.flush
        self._groups = groups
        self._block_size = block_size
        self.cells = [[ZERO] * (group.num_reserved * block_size) for group in groups]
        self.touched: list[set[int]] = [set() for _ in groups]
        """By group, the blocks that take memory: those filled since they were given back."""
        self.num_given_back = 0
        """Blocks, however often."""
        self._has_stages = has_stages
        self.slots: list[dict[int, list[int]]] = [{} for _ in groups]
        """By group and place, the contents of host slots."""
        self._places: list[dict[int, int]] = [{} for _ in groups]
        """By group, of the slots whose place is not the one of their number."""
        self.counts: Counter[str] = Counter()
        self.num_moved_blocks = 0
        """Between host and device, before the last step."""
        self.on_the_way: Counter[Place] = Counter()
        """What operations that were launched and not executed will fill."""
        self._queue: deque[Callable[[], None]] = deque()

    def block(self, group: int, block_id: int) -> list[int]:
        start = block_id * self._block_size
        return self.cells[group][start : start + self._block_size]

    def place(self, group: int, slot: int) -> int:
        return self._places[group].get(slot, slot)

    def lose_places(self, group: int, end: int) -> None:
        """Others have the memory of the host places before `end`."""
        for place in range(end):
            self.slots[group][place] = [ZERO] * self._block_size

    def _give_up(self, operation: GiveUpSlots) -> None:
        group, slots = operation.group, self.slots[operation.group]
        self.counts["slots_given_up"] += len(operation.host_slots)
        for place, slot in enumerate(operation.host_slots, operation.first_place):
            slot_of = {each: number for number, each in self._places[group].items()}
            freed, other = self.place(group, slot), slot_of.get(place, place)
            slots[freed] = slots.get(place, [])
            slots[place] = [ZERO] * self._block_size
            self._places[group].update({other: freed, slot: place})

    def launch(self, work: Callable[[], None]) -> None:
        """Queue work behind all that was launched before."""
        self._queue.append(work)

    def wait_for(self, work: Callable[[], None]) -> None:
        """Execute everything up to this work, if it was not executed yet."""
        while work in self._queue:
            self._queue.popleft()()

    def flush(self) -> None:
        """Execute everything that was launched."""
        while self._queue:
            self._queue.popleft()()

    def launch_operations(self, operations: Sequence[KvOperation]) -> None:
        self.num_moved_blocks = sum(
            len(operation.block_ids)
            for operation in operations
            if isinstance(operation, SwapOut | SwapIn)
        )
        self.on_the_way += moved(operations)
        if not self._has_stages:
            self._touch(operations)
        self.launch(lambda: self._execute(operations))
        if any(map(_waits_for_copies, operations)):
            self.flush()

    def _touch(self, operations: Sequence[KvOperation]) -> None:
        """Note whose memory operations take, or give back."""
        for operation in operations:
            match operation:
                case ZeroBlocks(group, block_ids) | SwapIn(group, _, block_ids):
                    self.touched[group].update(block_ids)
                case CopyBlock(group, _, target):
                    self.touched[group].add(target)
                case GiveBackBlocks(group, block_ids):
                    self.touched[group].difference_update(block_ids)
                    self.num_given_back += len(block_ids)
                    self.counts["given_back"] += 1

    def _execute(self, operations: Sequence[KvOperation]) -> None:
        self.on_the_way -= moved(operations)
        if self._has_stages:
            self._touch(operations)
        for operation in operations:
            match operation:
                case ZeroBlocks(group, block_ids):
                    for block_id in block_ids:
                        self._set_block(group, block_id, [ZERO] * self._block_size)
                case CopyBlock(group, source, target):
                    self._set_block(group, target, self.block(group, source))
                    self.counts["copies"] += 1
                case SwapOut(group, block_ids, host_slots):
                    for block_id, slot in zip(block_ids, host_slots, strict=True):
                        self.slots[group][self.place(group, slot)] = self.block(group, block_id)
                    self.counts["swaps_out"] += 1
                case SwapIn(group, host_slots, block_ids):
                    for slot, block_id in zip(host_slots, block_ids, strict=True):
                        self._set_block(group, block_id, self.slots[group][self.place(group, slot)])
                    self.counts["swaps_in"] += 1
                case ToDisk() | FromDisk() | EraseOnDisk():
                    self._use_disk(operation)
                case GiveBackBlocks(group, block_ids):
                    for block_id in block_ids:
                        self._set_block(group, block_id, [ZERO] * self._block_size)
                case RestoreBlocks():
                    pass
                case GiveUpSlots():
                    self._give_up(operation)
                case _:
                    assert_never(operation)

    def _use_disk(self, operation: ToDisk | FromDisk | EraseOnDisk) -> None:
        assert self._disk is not None, "there is no disk"
        match operation:
            case ToDisk(group, source, is_on_host):
                place = self.place(group, source)
                found = self.slots[group][place] if is_on_host else self.block(group, source)
                self._disk.write(operation, list(found))
            case FromDisk(group, _, host_slot):
                place = self.place(group, host_slot)
                self._disk.read(
                    operation, lambda values: self.slots[group].__setitem__(place, values)
                )
            case EraseOnDisk():
                self._disk.erase(operation)

    def run(self, rows: Sequence[Computed], num_owners: Sequence[Counter[int]]) -> None:
        """One forward: all reads, then all writes. `num_owners`: by group, of each block when the
        step was launched."""
        for row in rows:
            self._read(row)
        for index in range(len(self._groups)):
            for row in rows:
                for block_id in self._write(index, row) | self._compact(index, row):
                    owners = num_owners[index][block_id]
                    require(
                        owners == 1,
                        Invariant.ONE_WRITER,
                        f"{row.name} writes block {block_id} of group {index}, "
                        f"which has {owners} owners",
                    )

    def clear(self, tables: Sequence[Sequence[int]], start: int, end: int) -> None:
        """Zero places `[start, end)` of the sequence with these blocks, in its turn."""
        self.launch(lambda: self._clear(tables, start, end))

    def _clear(self, tables: Sequence[Sequence[int]], start: int, end: int) -> None:
        size = self._block_size
        for group, table, cells in zip(self._groups, tables, self.cells, strict=True):
            for position in range(start, end):
                if group.holds_states:
                    break  # nothing reads them: the sequence ends
                block_id = table[position // size]
                require(block_id, Invariant.ONE_WRITER, "the null block is cleared")
                cells[block_id * size + position % size] = ZERO

    def _read(self, row: Computed) -> None:
        """Check every block that a query of this sequence sees."""
        size, num_computed = self._block_size, row.start
        if row.before is None:
            return
        for index, group in enumerate(self._groups):
            table, cells = row.tables[index], self.cells[index]
            if group.holds_states:
                self._read_states(row, table, cells)
                continue
            for block in _visible_blocks(group, num_computed, size):
                start, first = block * size, table[block] * size
                length = min(size, num_computed - start)
                if cells[first : first + length] != row.before[start : start + length]:
                    require(
                        False,
                        Invariant.OWN_CONTENT,
                        f"{row.name} reads block {table[block]} of group {index} as its "
                        f"{block}th: {cells[first : first + length]}, "
                        f"not {row.before[start : start + length]}",
                    )

    def _read_states(self, row: Computed, table: Sequence[int], cells: Sequence[int]) -> None:
        """The sequence goes on from the states after the token before."""
        if not row.start or row.before is None:
            return
        block_id = table[(row.start - 1) // self._block_size]
        found = cells[block_id * self._block_size]
        require(
            found == row.before[-1],
            Invariant.OWN_CONTENT,
            f"{row.name} goes on from the states {found} of block {block_id}, not {row.before[-1]}",
        )

    def _write(self, index: int, row: Computed) -> set[int]:
        """Write the values of the new positions; return the blocks that were written."""
        size = self._block_size
        table, cells = row.tables[index], self.cells[index]
        end = row.start + len(row.values)
        if self._groups[index].holds_states:
            block_id = table[(end - 1) // size]
            require(block_id, Invariant.OWN_CONTENT, f"{row.name} writes the null block")
            cells[block_id * size] = row.values[-1]
            self.counts["states"] += 1
            return {block_id}
        written = set()
        for position, value in enumerate(row.values, row.start):
            block_id = table[position // size]
            require(block_id, Invariant.OWN_CONTENT, f"{row.name} writes the null block")
            cells[block_id * size + position % size] = value
            written.add(block_id)
        last = table[(end - 1) // size] * size
        rest = cells[last + (end - 1) % size + 1 : last + size]
        require(
            not any(is_foreign(value, row.owner) for value in rest),
            Invariant.OWN_CONTENT,
            f"{row.name}'s last block ends with somebody else's {rest}",
        )
        return written

    def _compact(self, index: int, row: Computed) -> set[int]:
        """Move the last tokens to the targets; return the blocks that were written."""
        if not row.targets:
            return set()
        size, cells = self._block_size, self.cells[index]
        table, target = row.tables[index], row.targets[index]
        first = row.start + len(row.values) - row.num_kept
        for place in range(row.num_kept):
            source = first + place
            value = cells[table[source // size] * size + source % size]
            cells[target[place // size] * size + place % size] = value
        self.counts["compactions"] += 1
        return set(target)

    def _set_block(self, group: int, block_id: int, values: list[int]) -> None:
        require(block_id, Invariant.ONE_WRITER, "an operation writes the null block")
        start = block_id * self._block_size
        self.cells[group][start : start + self._block_size] = values


def _waits_for_copies(operation: KvOperation) -> bool:
    """Whether earlier copies to the host must be in their slots before it begins."""
    match operation:
        case ToDisk():
            return operation.is_on_host
        case FromDisk() | EraseOnDisk() | GiveUpSlots():
            return True
        case _:
            return False


def _visible_blocks(group: KvGroup, num_computed: int, block_size: int) -> Iterable[int]:
    """The blocks of computed positions that the next query sees."""
    num_blocks = -(-num_computed // block_size)
    if group.window is None:
        return range(num_blocks)
    first = max(num_computed - group.window.size + 1, 0)
    if group.window.is_chunked:
        first = num_computed - num_computed % group.window.size
    first //= block_size
    sinks = range(min(-(-group.sinks // block_size), first))
    return chain(sinks, range(first, num_blocks))
