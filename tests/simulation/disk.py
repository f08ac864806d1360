"""A simulated disk for prefixes. It outlives engines; its work is late, and fails at times."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.kv.disk_tier import Done, Erased, Restored, WasRead, Written
from loraplex.engine.kv.layout import EraseOnDisk, FromDisk, ToDisk
from loraplex.engine.kv.prefix_cache import Prefix

MAX_WRITES = 4
"""That wait."""


class Stored(NamedTuple):
    prefix: Prefix
    values: list[int]


class FakeDisk:
    """Has a block by group and slot. Only the prefix with which it was written finds it."""

    def __init__(self, rng: Random, *, mishaps: float) -> None:
        """`mishaps`: part of the writes and reads that fail."""
        self.blocks: dict[tuple[int, int], Stored] = {}
        """In the order in which they were written."""
        self.counts: Counter[str] = Counter()
        self.flush: Callable[[], None] = lambda: None
        """Lets the device execute what was launched, for which a thread waits."""
        self._rng = rng
        self._mishaps = mishaps
        self._jobs: deque[Callable[[], Done]] = deque()
        self._num_writes = 0

    # --- as `disk_tier.Store` ---------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return MAX_WRITES - self._num_writes

    @property
    def is_off(self) -> bool:
        return False

    def take_restored(self) -> Sequence[Restored]:
        self.counts["disk_restored"] += len(self.blocks)
        return [Restored(*place, stored.prefix) for place, stored in self.blocks.items()]

    def take_done(self) -> Sequence[Done]:
        if self._rng.random() < 0.5:
            self.flush()
        done = []
        while self._jobs and self._rng.random() < 0.6:
            done.append(self._jobs.popleft()())
        return done

    # --- what the device begins -------------------------------------------------------------------

    def write(self, operation: ToDisk, values: list[int]) -> None:
        self._num_writes += 1
        self._jobs.append(lambda: self._write(operation, values))

    def read(self, operation: FromDisk, put: Callable[[list[int]], None]) -> None:
        self._jobs.append(lambda: self._read(operation, put))

    def erase(self, operation: EraseOnDisk) -> None:
        self._jobs.append(lambda: self._erase(operation.adapter))

    # --- what befalls it --------------------------------------------------------------------------

    def forget_work(self) -> None:
        """The engine has ended."""
        self._jobs.clear()
        self._num_writes = 0

    def erase_now(self, adapter: AdapterKey) -> None:
        """As a server does whose engine is down."""
        self.blocks = {
            place: stored
            for place, stored in self.blocks.items()
            if not is_of(stored.prefix, adapter)
        }

    def _write(self, operation: ToDisk, values: list[int]) -> Done:
        self._num_writes -= 1
        place = (operation.group, operation.disk_slot)
        self.blocks.pop(place, None)  # torn, if it fails
        if self._fails():
            return Written(*place, is_right=False)
        self.blocks[place] = Stored(operation.prefix, values)
        self.counts["disk_writes"] += 1
        return Written(*place, is_right=True)

    def _read(self, operation: FromDisk, put: Callable[[list[int]], None]) -> Done:
        group, slot = operation.group, operation.host_slot
        stored = self.blocks.get((group, operation.disk_slot))
        # Reads are few, so more of them fail.
        if stored is None or stored.prefix != operation.prefix or self._fails() or self._fails():
            put([self._rng.getrandbits(40)])  # what was decrypted until then
            self.counts["disk_misreads"] += 1
            return WasRead(group, slot, is_right=False, num_bytes=0, seconds=0.0)
        put(stored.values)
        self.counts["disk_reads"] += 1
        return WasRead(group, slot, is_right=True, num_bytes=1000, seconds=1e-6)

    def _erase(self, adapter: AdapterKey) -> Done:
        if self._fails():
            return Erased(adapter, is_right=False)
        self.erase_now(adapter)
        self.counts["disk_erasures"] += 1
        return Erased(adapter, is_right=True)

    def _fails(self) -> bool:
        return self._rng.random() < self._mishaps


def is_of(prefix: Prefix, adapter: AdapterKey) -> bool:
    own = prefix.namespace.adapter
    return own is not None and own.has_part(adapter)
