"""The interfaces that the adapter manager uses: a block, host memory and the device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from .block import PlacedExtra
from .extents import Extent, Placement
from .identity import AdapterKey


class Block(Protocol):
    """One adapter's block in host memory."""

    @property
    def num_elements(self) -> int: ...

    @property
    def table(self) -> npt.NDArray[np.int64]: ...

    @property
    def auxiliary(self) -> tuple[PlacedExtra, ...]: ...

    @property
    def vocab_size(self) -> int | None: ...


BlockT = TypeVar("BlockT", bound=Block)
BlockT_co = TypeVar("BlockT_co", bound=Block, covariant=True)
BlockT_contra = TypeVar("BlockT_contra", bound=Block, contravariant=True)


class Host(Protocol[BlockT_co]):
    """Host memory; `host_cache.HostCache` states the contract."""

    def keys(self) -> list[AdapterKey]: ...

    def holds(self, key: AdapterKey) -> bool: ...

    def acquire(self, key: AdapterKey) -> BlockT_co | None: ...

    def release(self, key: AdapterKey) -> None: ...

    def read(self, key: AdapterKey, *paths: Path) -> BlockT_co | None: ...

    def remove(self, key: AdapterKey) -> None: ...

    def take_changed(self) -> list[AdapterKey]: ...

    def size_of(self, key: AdapterKey) -> int: ...

    def size_on_disk(self, path: Path) -> int: ...

    def remember_evicted(self, num_bytes: int) -> None: ...

    def take_ghost(self, key: AdapterKey) -> bool: ...

    def resize(self, capacity_bytes: int) -> bool: ...

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def refused_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int: ...


class DeviceArena(Protocol[BlockT_contra]):
    """Device memory; `arena.Arena` states the contract."""

    @property
    def capacity(self) -> int: ...

    @property
    def reserved(self) -> int: ...

    def resize(self, capacity: int) -> None: ...

    @property
    def element_bytes(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    @property
    def largest_free(self) -> int: ...

    def place(
        self,
        key: AdapterKey,
        num_elements: int,
        block_table: npt.NDArray[np.int64],
        auxiliary: Sequence[PlacedExtra] = (),
        *,
        vocab_size: int | None = None,
        avoid: Sequence[Extent] = (),
    ) -> Placement | None: ...

    def place_again(self, row: int, *, avoid: Sequence[Extent] = ()) -> Placement | None: ...

    def copy_into(self, placement: Placement, block: BlockT_contra) -> None: ...

    def copy_between(self, source: Placement, target: Placement) -> None: ...

    def publish(self, placement: Placement) -> None: ...

    def retire(self, placement: Placement) -> None: ...

    def erase(self, placement: Placement) -> None: ...

    def free(self, placement: Placement) -> None: ...
