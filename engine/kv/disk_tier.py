"""The prefixes on disk: what is written, read and erased, over all KV groups. Torch-free.

A published block is written in the background, whatever tier it is in when its turn comes, so a
restart finds what was in use. A prefix is read into host slots, where an admission finds it. The
bookkeeping is done here; the store does the work in a thread of its own and reports each end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ...adapters.identity import AdapterKey
from .disk_slots import DiskSlots
from .group_blocks import GroupBlocks
from .layout import EraseOnDisk, FromDisk, OperationLog, ToDisk
from .prefix_cache import Prefix

MAX_SPILLED_BYTES = 1 << 20
"""What one step copies for the disk at most, but a block at least."""


MAX_FILLING = 0.5
"""The part of the host slots that are held while the disk fills them, at most: preempted sequences
need slots too."""


class Written(NamedTuple):
    """A block was written, or failed to be."""

    group: int
    disk_slot: int
    is_right: bool


class WasRead(NamedTuple):
    """A prefix was read into a host slot, or failed to be."""

    group: int
    host_slot: int
    is_right: bool
    num_bytes: int
    seconds: float


class Erased(NamedTuple):
    """An adapter's prefixes cannot be read any more, or erasing them failed."""

    adapter: AdapterKey
    is_right: bool


Done = Written | WasRead | Erased


class Restored(NamedTuple):
    """A prefix that an earlier process has written."""

    group: int
    disk_slot: int
    prefix: Prefix


class Store(Protocol):
    """Does the work. It begins what the log's operations say when they are executed, and ends
    erasures after the writes and reads that were begun before."""

    @property
    def num_free(self) -> int:
        """The number of writes that may be begun now without waiting for memory."""

    @property
    def is_off(self) -> bool:
        """Whether the disk has failed: nothing is written or read any more."""

    def take_restored(self) -> Sequence[Restored]:
        """What an earlier process has written, the oldest first; once."""

    def take_done(self) -> Sequence[Done]:
        """What has ended since the last call, in order."""


@dataclass(slots=True)
class DiskCounts:
    """Counters since the start."""

    num_written: int = 0
    """Blocks."""
    written_bytes: int = 0
    num_read: int = 0
    """Blocks."""
    num_dropped: int = 0
    """Blocks that had left device and host before they could be written, or found no room."""
    num_failed: int = 0
    """Blocks that were not read: the file has other content, or the disk failed."""
    read_bytes: int = 0
    read_seconds: float = 0.0


class _Read(NamedTuple):
    prefix: Prefix
    disk_slot: int


Place = tuple[int, bytes]
"""A KV group and the key of a prefix."""


class DiskTier:
    """What is on disk and on its way, for the scheduler."""

    def __init__(
        self,
        groups: Sequence[GroupBlocks],
        operations: OperationLog,
        store: Store,
        num_slots: Sequence[int],
        block_bytes: Sequence[int],
        *,
        tenant_cap: float = 1.0,
    ) -> None:
        """`num_slots`, `block_bytes`: per group. `tenant_cap`: see `KvBlocks`."""
        self.counts = DiskCounts()
        self.slots = [DiskSlots(count, tenant_cap=tenant_cap) for count in num_slots]
        """Per group."""
        self._groups = groups
        self._operations = operations
        self._store = store
        self._block_bytes = block_bytes
        self._candidates: OrderedDict[Place, Prefix] = OrderedDict()
        """Published blocks that are to be written, the first first."""
        self._reads: dict[tuple[int, int], _Read] = {}
        """By group and host slot."""
        self._doomed: set[AdapterKey] = set()
        """Adapters whose erasure has begun and has not ended."""
        for group, disk_slot, prefix in store.take_restored():
            self.slots[group].adopt(disk_slot, prefix)

    @property
    def is_off(self) -> bool:
        return self._store.is_off

    @property
    def is_busy(self) -> bool:
        """Whether something will end, or can begin, without a message."""
        may_spill = bool(self._candidates) and self._store.num_free > 0
        return may_spill or self._is_working

    @property
    def used_bytes(self) -> int:
        return sum(
            len(slots.prefixes) * size
            for slots, size in zip(self.slots, self._block_bytes, strict=True)
        )

    @property
    def capacity_bytes(self) -> int:
        return sum(
            slots.num_slots * size
            for slots, size in zip(self.slots, self._block_bytes, strict=True)
        )

    def find(self, group: int, prefix: Prefix) -> int | None:
        """The slot with this prefix."""
        return None if self.is_off else self.slots[group].find(prefix)

    # --- writing ----------------------------------------------------------------------------------

    def offer(self, group: int, prefix: Prefix) -> None:
        """The block of this prefix is complete: write it when there is time."""
        slots = self.slots[group]
        if self.is_off or slots.find(prefix) is not None or slots.is_filling(prefix):
            return
        self._candidates.setdefault((group, prefix.key), prefix)

    def spill(self) -> None:
        """Queue copies of some blocks that are to be written."""
        num_bytes, num_free = 0, self._store.num_free
        while self._candidates and num_free > 0 and num_bytes < MAX_SPILLED_BYTES:
            (group, _), prefix = self._candidates.popitem(last=False)
            if self._begin_write(group, prefix):
                num_bytes += self._block_bytes[group]
                num_free -= 1

    def _begin_write(self, group: int, prefix: Prefix) -> bool:
        block_id = self._groups[group].cached.find(prefix)
        source = self._groups[group].host.find(prefix) if block_id is None else block_id
        slot = None if source is None else self.slots[group].reserve(prefix)
        if source is None or slot is None:
            self.counts.num_dropped += 1
            return False
        self._operations.add(ToDisk(group, source, block_id is None, slot, prefix))
        return True

    # --- reading ----------------------------------------------------------------------------------

    def touch(self, group: int, prefixes: Iterable[Prefix]) -> None:
        """These prefixes are used now."""
        for prefix in prefixes:
            self.slots[group].touch(prefix)

    def read(self, group: int, prefix: Prefix) -> Place | None:
        """Begin to read a prefix into a host slot, if nobody has; None: the host has no room."""
        host, disk_slot = self._groups[group].host, self.slots[group].find(prefix)
        assert disk_slot is not None, "the prefix was found before"
        if not host.is_filling(prefix):
            has_room = len(host.filling) < host.num_slots * MAX_FILLING
            slot = host.reserve(prefix) if has_room else None
            if slot is None:
                return None
            self.slots[group].share([disk_slot])
            self._reads[group, slot] = _Read(prefix, disk_slot)
            self._operations.add(FromDisk(group, disk_slot, slot, prefix))
        return group, prefix.key

    def is_coming(self, place: Place) -> bool:
        """Whether this prefix is still being read."""
        return place[1] in self._groups[place[0]].host.filling_keys

    # --- erasing ----------------------------------------------------------------------------------

    def erase(self, adapter: AdapterKey) -> None:
        """Find none of its prefixes any more, and begin to erase them."""
        for slots in self.slots:
            slots.prefixes.drop_adapter(adapter)
        self._candidates = OrderedDict(
            (place, prefix)
            for place, prefix in self._candidates.items()
            if not _is_of(prefix, adapter)
        )
        if adapter not in self._doomed:
            self._doomed.add(adapter)
            self._operations.add(EraseOnDisk(adapter))

    def is_erasing(self, adapter: AdapterKey) -> bool:
        return adapter in self._doomed

    # --- what has ended ---------------------------------------------------------------------------

    def poll(self) -> None:
        """Take note of what the store has done."""
        for done in self._store.take_done():
            match done:
                case Written(group, disk_slot, is_right):
                    self._end_write(group, disk_slot, is_right=is_right)
                case WasRead():
                    self._end_read(done)
                case Erased(adapter, True):
                    self._doomed.remove(adapter)
                case Erased(adapter):
                    self._operations.add(EraseOnDisk(adapter))
        if self.is_off:
            self._candidates.clear()

    def _end_write(self, group: int, disk_slot: int, *, is_right: bool) -> None:
        slots = self.slots[group]
        is_right = is_right and not self._is_doomed(slots.filling[disk_slot])
        slots.filled(disk_slot, is_right=is_right)
        self.counts.num_written += is_right
        self.counts.written_bytes += is_right * self._block_bytes[group]

    def _end_read(self, done: WasRead) -> None:
        host, slots = self._groups[done.group].host, self.slots[done.group]
        read = self._reads.pop((done.group, done.host_slot))
        is_doomed = self._is_doomed(read.prefix)
        host.filled(done.host_slot, is_right=done.is_right and not is_doomed)
        slots.give_back([read.disk_slot])
        if done.host_slot not in host.prefixes:  # no deletion would find what was put there
            self._groups[done.group].erase_on_host([done.host_slot])
        if is_doomed:
            return
        if done.is_right:
            slots.touch(read.prefix)
            self.counts.num_read += 1
            self.counts.read_bytes += done.num_bytes
            self.counts.read_seconds += done.seconds
        else:
            self.counts.num_failed += 1
            slots.discard(read.prefix)

    @property
    def _is_working(self) -> bool:
        return bool(self._reads or self._doomed or any(slots.filling for slots in self.slots))

    def _is_doomed(self, prefix: Prefix) -> bool:
        return any(_is_of(prefix, adapter) for adapter in self._doomed)

    def check_integrity(self) -> None:
        """Assert that each slot is free, or held by what is written to or read from it."""
        for group, slots in enumerate(self.slots):
            slots.check_integrity(
                read.disk_slot for (owner, _), read in self._reads.items() if owner == group
            )


def _is_of(prefix: Prefix, adapter: AdapterKey) -> bool:
    own = prefix.namespace.adapter
    return own is not None and own.has_part(adapter)
