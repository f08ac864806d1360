"""A world for residency without threads, tensors or time: each is moved by the test's hand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from loraplex.adapters.block import PlacedExtra
from loraplex.adapters.errors import ArenaTooSmall
from loraplex.adapters.extents import Extent, ExtentAllocator, Placement
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.residency import Residency, Tier

P = ParamSpec("P")
T = TypeVar("T")

TABLE = np.zeros((1, 3), dtype=np.int64)


class ManualExecutor(Executor):
    """Runs a job when told to; `fail_next` makes one raise instead."""

    def __init__(self) -> None:
        self._jobs: list[tuple[Future[object], Callable[[], object]]] = []

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
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
            raise  # a broken contract is no fault that residency has to live with
        except Exception as exc:
            future.set_exception(exc)

    def run_all(self) -> None:
        while self._jobs:
            self.run()


class FakeBlock(NamedTuple):
    key: AdapterKey
    num_elements: int
    table: npt.NDArray[np.int64] = TABLE
    extras: tuple[PlacedExtra, ...] = ()


class FakeHost:
    """Host memory that counts elements. `files` says what lies at a path."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.files: dict[Path, int | Exception] = {}
        self.blocks: OrderedDict[AdapterKey, FakeBlock] = OrderedDict()
        self.in_use: set[AdapterKey] = set()

    @property
    def used(self) -> int:
        return sum(block.num_elements for block in self.blocks.values())

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

    def read(self, key: AdapterKey, path: Path) -> FakeBlock | None:
        assert key not in self.blocks
        size = self.files.get(path, FileNotFoundError(path))
        if isinstance(size, Exception):
            raise size
        if size > self.capacity:
            raise ArenaTooSmall
        while self.used + size > self.capacity:
            victim = next((key for key in self.blocks if key not in self.in_use), None)
            if victim is None:
                return None
            del self.blocks[victim]
        self.in_use.add(key)
        self.blocks[key] = FakeBlock(key, size)
        return self.blocks[key]

    def remove(self, key: AdapterKey) -> None:
        assert key not in self.in_use
        self.blocks.pop(key, None)


class FakeArena:
    """Cells that hold the key of the adapter that was copied there; None is zero."""

    element_bytes = 2

    def __init__(self, capacity: int) -> None:
        self.extents = ExtentAllocator(capacity)
        self.cells: list[AdapterKey | None] = [None] * capacity
        self.placements: dict[int, tuple[AdapterKey, Placement]] = {}
        self.published: set[int] = set()
        self._num_placed = 0

    @property
    def capacity(self) -> int:
        return self.extents.capacity

    @property
    def used(self) -> int:
        return self.extents.used

    def identity(self, row: int) -> tuple[AdapterKey, int] | None:
        if row not in self.published:
            return None
        key, placement = self.placements[row]
        return key, placement.generation

    def place(
        self,
        key: AdapterKey,
        num_elements: int,
        block_table: npt.NDArray[np.int64],
        extras: Sequence[PlacedExtra] = (),
        *,
        avoid: Extent | None = None,
    ) -> Placement | None:
        extent = self.extents.allocate(num_elements, avoid=avoid)
        if extent is None:
            return None
        self._num_placed += 1
        row = next(row for row in range(len(self.placements) + 1) if row not in self.placements)
        placement = Placement(row, self._num_placed, extent)
        self.placements[row] = key, placement
        return placement

    def copy_into(self, placement: Placement, block: FakeBlock) -> None:
        assert self.placements[placement.row] == (block.key, placement)
        extent = placement.extent
        assert not any(self.cells[extent.offset : extent.end]), "the extent holds zeros"
        self.cells[extent.offset : extent.end] = [block.key] * extent.size

    def publish(self, placement: Placement) -> None:
        key, placed = self.placements[placement.row]
        assert placed == placement
        assert set(self.cells[placement.extent.offset : placement.extent.end]) == {key}
        self.published.add(placement.row)

    def remove(self, row: int) -> None:
        _, placement = self.placements.pop(row)
        self.published.discard(row)
        extent = placement.extent
        self.cells[extent.offset : extent.end] = [None] * extent.size
        self.extents.free(extent)


class ResidencyWorld:
    """Residency with everything around it."""

    def __init__(self, *, arena: int = 10, host: int = 100) -> None:
        self.now = 100.0
        self.executor = ManualExecutor()
        self.arena = FakeArena(arena)
        self.host = FakeHost(host)
        self.wanted: list[AdapterKey] = []
        self.residency: Residency[FakeBlock] = Residency(
            arena=self.arena,
            host=self.host,
            executor=self.executor,
            want=self.wanted.append,
            clock=lambda: self.now,
        )

    def fetch(self, key: AdapterKey, size: int | Exception, tier: Tier = Tier.STORE) -> None:
        """Answer the oldest wish for this adapter."""
        self.wanted.remove(key)
        path = Path("/cache") / key.tenant_id / key.digest
        self.host.files[path] = size
        self.residency.fetched(key, path, tier)

    def settle(self) -> None:
        """Run everything that can run without time passing."""
        self.residency.poll()
        while len(self.executor):
            self.executor.run_all()
            self.residency.poll()

    def load(self, key: AdapterKey, size: int) -> None:
        """Bring an adapter as far as it gets."""
        self.residency.request(key)
        if key in self.wanted:
            self.fetch(key, size)
        self.settle()

    def use(self, key: AdapterKey, size: int, request_id: str = "user") -> None:
        """Load, lease and release: the adapter is resident, claimed and idle."""
        self.load(key, size)
        assert self.residency.acquire(key, request_id) is not None
        self.residency.release(request_id)
