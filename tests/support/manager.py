"""An adapter manager without threads, tensors or time: the test drives each of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from loraplex.adapters.block import PlacedExtra
from loraplex.adapters.errors import ArenaTooSmall
from loraplex.adapters.extents import Extent, ExtentAllocator, Placement
from loraplex.adapters.ghosts import Ghosts
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import AdapterManager, Tier

P = ParamSpec("P")
T = TypeVar("T")

TABLE = np.zeros((1, 3), dtype=np.int64)


class ManualLoaders:
    """Runs a job when told to, or makes it fail."""

    def __init__(self) -> None:
        self._jobs: list[tuple[Future[object], Callable[[], object]]] = []

    def submit(
        self, num_bytes: int, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        assert num_bytes >= 0
        future: Future[T] = Future()
        self._jobs.append((future, lambda: fn(*args, **kwargs)))  # type: ignore[arg-type]
        return future

    def __len__(self) -> int:
        return len(self._jobs)

    def run(self, index: int = 0, *, error: Exception | None = None) -> None:
        future, job = self._jobs.pop(index)
        try:
            if error is not None:
                raise error
            future.set_result(job())
        except AssertionError:
            raise  # a broken contract is not a fault that the manager must handle
        except Exception as exc:
            future.set_exception(exc)

    def run_all(self) -> None:
        while self._jobs:
            self.run()


class FakeBlock(NamedTuple):
    key: AdapterKey
    num_elements: int
    table: npt.NDArray[np.int64] = TABLE
    auxiliary: tuple[PlacedExtra, ...] = ()
    vocab_size: int | None = None


class FakeHost:
    """Host memory that counts elements. `files` says what lies at a path."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.files: dict[Path, int | Exception] = {}
        self.blocks: OrderedDict[AdapterKey, FakeBlock] = OrderedDict()
        self.in_use: set[AdapterKey] = set()
        self.changed: list[AdapterKey] = []
        self.reserved = capacity
        """The largest capacity."""
        self.on_grow: Callable[[int], None] = lambda capacity_bytes: None
        """Takes the memory away from others."""
        self.ghosts: Ghosts[AdapterKey] = Ghosts()
        self._most = capacity
        """Less than the capacity while it shrinks."""
        self._refused = 0

    @property
    def capacity_bytes(self) -> int:
        return self.capacity * FakeArena.element_bytes

    @property
    def refused_bytes(self) -> int:
        return self._refused * FakeArena.element_bytes

    def remember_evicted(self, num_bytes: int) -> None:
        self.ghosts.depth = num_bytes // FakeArena.element_bytes

    def take_ghost(self, key: AdapterKey) -> bool:
        return self.ghosts.take(key)

    def resize(self, capacity_bytes: int) -> bool:
        capacity = capacity_bytes // FakeArena.element_bytes
        assert capacity <= self.reserved
        self._most = capacity
        if not self._evict_until(capacity):
            return False
        if capacity > self.capacity:
            self.on_grow(capacity_bytes)
        self.capacity = capacity
        return True

    def _evict_until(self, most: int) -> bool:
        """Evict until no more is used; False: the rest is in use."""
        while self.used > most:
            victim = next((key for key in self.blocks if key not in self.in_use), None)
            if victim is None:
                return False
            self.ghosts.add(victim, self.blocks[victim].num_elements)
            self.remove(victim)
        return True

    @property
    def used(self) -> int:
        return sum(block.num_elements for block in self.blocks.values())

    @property
    def used_bytes(self) -> int:
        return self.used * FakeArena.element_bytes

    def size_of(self, key: AdapterKey) -> int:
        return self.blocks[key].num_elements * FakeArena.element_bytes if key in self.blocks else 0

    def size_on_disk(self, path: Path) -> int:
        size = self.files.get(path, 0)
        return size if isinstance(size, int) else 0

    def keys(self) -> list[AdapterKey]:
        return list(self.blocks)

    def holds(self, key: AdapterKey) -> bool:
        return key in self.blocks

    def acquire(self, key: AdapterKey) -> FakeBlock | None:
        if key in self.blocks:
            assert key not in self.in_use
            self.in_use.add(key)
            self.blocks.move_to_end(key)
        return self.blocks.get(key)

    def release(self, key: AdapterKey) -> None:
        self.in_use.remove(key)

    def read(self, key: AdapterKey, *paths: Path) -> FakeBlock | None:
        (path,) = paths
        assert key not in self.blocks
        size = self.files.get(path, FileNotFoundError(path))
        if isinstance(size, Exception):
            raise size
        if size > self.reserved:
            raise ArenaTooSmall
        if not self._evict_until(self._most - size):
            self._refused = size
            return None
        self.in_use.add(key)
        self.blocks[key] = FakeBlock(key, size)
        self.changed.append(key)
        return self.blocks[key]

    def remove(self, key: AdapterKey) -> None:
        assert key not in self.in_use
        self.blocks.pop(key, None)
        self.changed.append(key)

    def take_changed(self) -> list[AdapterKey]:
        changed, self.changed = self.changed, []
        return changed


class FakeArena:
    """Cells that hold the key of the adapter that was copied there; None is zero."""

    element_bytes = 2

    def __init__(self, capacity: int, reserved: int = 0) -> None:
        """`reserved`: the largest capacity, if that is more."""
        self.extents = ExtentAllocator(capacity)
        self.reserved = max(reserved, capacity)
        self.cells: list[AdapterKey | None] = [None] * self.reserved
        self.placements: dict[int, tuple[AdapterKey, Placement]] = {}
        self.published: dict[int, tuple[AdapterKey, int]] = {}
        self._num_placed = 0

    @property
    def capacity(self) -> int:
        return self.extents.capacity

    @property
    def used(self) -> int:
        return self.extents.used

    @property
    def num_free(self) -> int:
        return self.extents.num_free

    @property
    def largest_free(self) -> int:
        return self.extents.largest_free

    def resize(self, capacity: int) -> None:
        assert capacity <= self.reserved
        self.extents.resize(capacity)
        assert not any(self.cells[self.capacity :]), "what is taken away holds zeros"

    def place(
        self,
        key: AdapterKey,
        num_elements: int,
        block_table: npt.NDArray[np.int64],
        auxiliary: Sequence[PlacedExtra] = (),
        *,
        vocab_size: int | None = None,
        avoid: Sequence[Extent] = (),
    ) -> Placement | None:
        return self._occupy(key, num_elements, avoid)

    def place_again(self, row: int, *, avoid: Sequence[Extent] = ()) -> Placement | None:
        assert row in self.published
        key, placement = self.placements[row]
        return self._occupy(key, placement.extent.size, avoid)

    def _occupy(self, key: AdapterKey, size: int, avoid: Sequence[Extent]) -> Placement | None:
        extent = self.extents.allocate(size, avoid=avoid)
        if extent is None:
            return None
        self._num_placed += 1
        row = next(row for row in range(len(self.placements) + 1) if row not in self.placements)
        placement = Placement(row, self._num_placed, extent)
        self.placements[row] = key, placement
        return placement

    def copy_into(self, placement: Placement, block: FakeBlock) -> None:
        assert self.placements[placement.row] == (block.key, placement)
        self._write(placement.extent, [block.key] * placement.extent.size)

    def copy_between(self, source: Placement, target: Placement) -> None:
        key, placed = self.placements[source.row]
        assert placed == source
        assert self.placements[target.row] == (key, target)
        self._write(target.extent, self._read(source.extent))

    def _write(self, extent: Extent, keys: list[AdapterKey | None]) -> None:
        assert not any(self._read(extent)), "the extent holds zeros"
        self.cells[extent.offset : extent.end] = keys

    def _read(self, extent: Extent) -> list[AdapterKey | None]:
        return self.cells[extent.offset : extent.end]

    def publish(self, placement: Placement) -> None:
        key, placed = self.placements[placement.row]
        assert placed == placement
        assert set(self.cells[placement.extent.offset : placement.extent.end]) == {key}
        key, _ = self.placements[placement.row]
        self.published[placement.row] = (key, placement.generation)

    def retire(self, placement: Placement) -> None:
        assert self.placements[placement.row][1] == placement
        self.published.pop(placement.row, None)

    def erase(self, placement: Placement) -> None:
        assert self.placements[placement.row][1] == placement
        assert placement.row not in self.published
        self.cells[placement.extent.offset : placement.extent.end] = [None] * placement.extent.size

    def free(self, placement: Placement) -> None:
        _, placed = self.placements.pop(placement.row)
        assert placed == placement
        assert placement.row not in self.published
        assert not any(self._read(placement.extent)), "a free extent holds zeros"
        self.extents.free(placement.extent)


class ManagerWorld:
    """An adapter manager with everything around it."""

    def __init__(
        self, *, arena: int = 10, host: int = 100, num_soon: int = 8, reserved: int = 0
    ) -> None:
        self.now = 100.0
        self.loaders = ManualLoaders()
        self.arena = FakeArena(arena, reserved)
        self.host = FakeHost(host)
        self._wanted: list[AdapterKey] = []
        self._read: list[AdapterKey] = []
        self.manager: AdapterManager[FakeBlock] = AdapterManager(
            arena=self.arena,
            host=self.host,
            loaders=self.loaders,
            clock=lambda: self.now,
            num_soon=num_soon,
        )
        self.reports = self.manager.reports

    @property
    def wanted(self) -> list[AdapterKey]:
        """What the fetcher was asked for, as long as the test leaves it there."""
        self._take_fetches()
        return self._wanted

    @property
    def read(self) -> list[AdapterKey]:
        """Of which the fetcher was told that they were read."""
        self._take_fetches()
        return self._read

    def _take_fetches(self) -> None:
        self._read += self.manager.fetches.take_read()
        self._wanted += self.manager.fetches.take_wanted()

    def fetch(self, key: AdapterKey, size: int | Exception, tier: Tier = Tier.STORE) -> None:
        """Answer the oldest wish for this adapter."""
        self.wanted.remove(key)
        path = Path("/cache") / key.tenant_id / key.digest
        self.host.files[path] = size
        self.manager.fetched(key, [path], tier)

    def settle(self) -> None:
        """Run everything that can run without time passing."""
        self.manager.poll()
        while len(self.loaders):
            self.loaders.run_all()
            self.manager.poll()
        self._take_fetches()

    def load(self, key: AdapterKey, size: int) -> None:
        """Bring an adapter as far as it gets."""
        self.manager.request(key)
        if key in self.wanted:
            self.fetch(key, size)
        self.settle()

    def resident(self) -> set[AdapterKey]:
        """Who is on the device."""
        return {status.key for status in self.reports.snapshot() if status.tier is Tier.DEVICE}

    def evicted(self) -> list[AdapterKey]:
        """Whose deletion ended since the last call."""
        return [evicted.key for evicted in self.manager.take_evicted()]

    def use(self, key: AdapterKey, size: int, request_id: str = "user") -> None:
        """Load, lease and release: the adapter is resident, claimed and idle."""
        self.load(key, size)
        assert self.manager.acquire(key, request_id) is not None
        self.manager.release(request_id)
