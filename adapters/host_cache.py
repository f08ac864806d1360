"""Host memory cache of blocks that are ready to be copied to the device.

Reading a block folds each slice's scale into B in fp32 and rounds once to the serving dtype. All
blocks are in one pool that is allocated at start, so the bound in bytes is exact and loading
allocates no memory. Bytes are zeroed before they are free again. The end of the pool may belong to
others for a time: see `resize`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .block import ALIGNMENT_ELEMENTS, BlockPlan, PlacedExtra
from .block_files import BlockFiles
from .block_reader import PIECE_ELEMENTS, BlockReader, Prepare
from .byte_shares import Holding, find_surplus
from .errors import ArenaTooSmall
from .extents import Extent, ExtentAllocator
from .ghosts import Ghosts
from .identity import AdapterKey
from .layout import BaseLayout
from .layout_part import LayoutPart
from .loaders import UNPACED, Pace, Paced
from .untouched import untouched_zeros


@dataclass(frozen=True, eq=False)
class HostBlock:
    """One adapter's block in host memory, in the serving dtype."""

    key: AdapterKey
    tensor: Tensor
    """`[num_elements]`, scales folded in; a view of the cache's pool."""
    table: npt.NDArray[np.int64]
    """`BlockPlan.table`: offsets from the start of the block."""
    auxiliary: tuple[PlacedExtra, ...]
    """`BlockPlan.placed_auxiliary`, likewise."""
    extent: Extent
    vocab_size: int | None = None
    """`BlockPlan.vocab_size`."""

    @property
    def num_elements(self) -> int:
        return self.tensor.numel()


class HostCache:
    """Least-recently-used cache of blocks, bounded in bytes. Every method is thread-safe.

    A block is *in use* from `read` or `acquire` until `release`; only unused blocks are dropped to
    make room. `page_locked` is for CUDA, where copies then run in parallel with kernels; torch
    rounds page-locked sizes up to a power of two.
    """

    def __init__(
        self,
        layout: BaseLayout,
        capacity_bytes: int,
        dtype: torch.dtype,
        *,
        page_locked: bool = False,
        prepare: Prepare | None = None,
        pace: Pace = UNPACED,
        part: LayoutPart | None = None,
        memory: Tensor | None = None,
    ) -> None:
        """`prepare` converts the auxiliary tensors of a block to their served values; see
        `ExtraKind`. `part`: what the blocks hold of each adapter; None: all.

        `memory`: uint8 on the host, as long as the cache can become; None: it has so many bytes of
        its own and keeps this size.

        `pace`: the share of a core that reading and zeroing may use while the engine's steps run.
        """
        self._reader = BlockReader(part or LayoutPart(layout), prepare=prepare, pace=pace)
        self._pace = pace
        self._dtype = dtype
        self._extents = ExtentAllocator(
            capacity_bytes // dtype.itemsize, alignment=ALIGNMENT_ELEMENTS
        )
        self._pool = (
            memory.view(dtype)
            if memory is not None
            else host_memory(self._extents.capacity, dtype, page_locked=page_locked)
        )
        self._withheld: tuple[Extent, ...] = ()
        """The end of the pool, while it is cleared: no block is placed there."""
        self._refused = 0
        """Elements that the last read found no room for."""
        self._ghosts: Ghosts[AdapterKey] = Ghosts()
        self._blocks: OrderedDict[AdapterKey, HostBlock] = OrderedDict()  # oldest use first
        self._in_use: set[AdapterKey] = set()
        self._changed: list[AdapterKey] = []
        self._lock = Lock()
        # Zeroing takes milliseconds, so it happens outside of `_lock`, which the engine's loop
        # takes in every step. Taken before `_lock`, never inside it.
        self._erasing = Lock()

    @property
    def capacity_bytes(self) -> int:
        return self._extents.capacity * self._dtype.itemsize

    @property
    def refused_bytes(self) -> int:
        """What the last `read` that returned None needs."""
        return self._refused * self._dtype.itemsize

    @property
    def used_bytes(self) -> int:
        """Bytes of cached blocks and of running reads."""
        return self._extents.used * self._dtype.itemsize

    def size_of(self, key: AdapterKey) -> int:
        """Bytes of a cached block; 0 if it is not here."""
        with self._lock:
            block = self._blocks.get(key)
        return 0 if block is None else block.extent.size * self._dtype.itemsize

    def size_on_disk(self, path: Path) -> int:
        """Bytes of a block's file; 0 if it does not exist."""
        try:
            return path.stat().st_size
        except OSError:
            return 0

    def keys(self) -> list[AdapterKey]:
        with self._lock:
            return list(self._blocks)

    def holds(self, key: AdapterKey) -> bool:
        with self._lock:
            return key in self._blocks

    def acquire(self, key: AdapterKey) -> HostBlock | None:
        """Take a cached block into use; None if it is not here."""
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
                self._in_use.add(key)
            return block

    def release(self, key: AdapterKey) -> None:
        """End the use of a block; it stays cached. Unknown keys are ignored."""
        with self._lock:
            self._in_use.discard(key)

    def read(self, key: AdapterKey, *paths: Path) -> HostBlock | None:
        """Read an adapter's block into the cache and take it into use. For a loader thread.

        `paths`: the files of `key.parts`.

        None if blocks in use leave no room: try again after a `release`. The caller never reads
        a key that the cache holds, nor one key twice at a time.

        Raises ObjectCorrupt if a file is no block of its adapter and this base or is truncated,
        NotComposable if a member of a composition has auxiliary tensors, ArenaTooSmall if the block
        is larger than the whole cache, AdapterUnavailable if a value is not finite in the serving
        type, OSError.
        """
        files = BlockFiles.open(key, paths)
        plan = self._reader.plan(files)
        num_elements = self._size(files, plan)
        if num_elements > len(self._pool):
            raise ArenaTooSmall(
                f"It needs {num_elements * self._dtype.itemsize} bytes of host memory."
            )
        extent = self._reserve(key, num_elements)
        if extent is None:
            self._refused = num_elements
            return None
        tensor = self._pool[extent.offset : extent.offset + num_elements]
        try:
            self._reader.fill(tensor, files, plan)
        except BaseException:
            with self._erasing:
                self._erase(extent)
            raise
        block = HostBlock(key, tensor, plan.table, plan.placed_auxiliary, extent, plan.vocab_size)
        with self._lock:
            self._blocks[key] = block
            self._in_use.add(key)
            self._changed.append(key)
        return block

    def remove(self, key: AdapterKey) -> None:
        """Drop this adapter's block; none of its bytes are left when this returns. Unknown keys are
        ignored."""
        with self._erasing:
            with self._lock:
                self._in_use.discard(key)
                block = self._blocks.pop(key, None)
                self._ghosts.take(key)
                self._changed.append(key)
            if block is not None:
                self._erase(block.extent)

    def extents(self) -> dict[AdapterKey, Extent]:
        """The places of the cached blocks in the pool."""
        with self._lock:
            return {key: block.extent for key, block in self._blocks.items()}

    def take_changed(self) -> list[AdapterKey]:
        """The keys whose blocks came or went since the last call."""
        with self._lock:
            changed, self._changed = self._changed, []
        return changed

    def remember_evicted(self, num_bytes: int) -> None:
        """Keep the keys of the last `num_bytes` of evicted blocks from now on."""
        with self._lock:
            self._ghosts.depth = num_bytes // self._dtype.itemsize

    def take_ghost(self, key: AdapterKey) -> bool:
        """Whether this block is among them; it is forgotten."""
        with self._lock:
            return self._ghosts.take(key)

    def resize(self, capacity_bytes: int) -> bool:
        """Let the cache have this many bytes, whole units of the alignment and at most `memory`;
        False: blocks in use are in the way. Call it again then; no block is placed there meanwhile.

        What is taken away holds zeros, and what is added is zeroed. For a loader thread.
        """
        capacity = capacity_bytes // self._dtype.itemsize
        with self._erasing:
            old = self._extents.capacity
            if capacity >= old:
                self._zero(Extent(old, capacity - old))
                with self._lock:
                    self._withheld = ()
                    self._extents.resize(capacity)
                return True
            with self._lock:
                self._withheld = (Extent(capacity, old - capacity),)
            self._clear_withheld()
            with self._lock:
                if self._extents.used_end > capacity:
                    return False
                self._extents.resize(capacity)
                self._withheld = ()
            return True

    def _clear_withheld(self) -> None:
        """Move the blocks out of use there to other places, and evict for the room that this
        takes, in the order of eviction."""
        while (block := self._idle_in_withheld()) is not None:
            size = block.extent.size
            with self._lock:
                target = self._extents.allocate(size, avoid=self._withheld)
                victim = None if target else self._pop_victim(block.key, size)
            if target is not None:
                self._move(block, target)
            elif victim is not None:
                self._erase(victim.extent)

    def _idle_in_withheld(self) -> HostBlock | None:
        with self._lock:
            return next(
                (
                    block
                    for key, block in self._blocks.items()
                    if key not in self._in_use and any(map(block.extent.overlaps, self._withheld))
                ),
                None,
            )

    def _move(self, block: HostBlock, target: Extent) -> None:
        """Move a block, unless it comes into use meanwhile."""
        tensor = self._pool[target.offset : target.offset + block.num_elements]
        work = Paced(self._pace)
        for start in range(0, block.num_elements, PIECE_ELEMENTS):
            piece = slice(start, start + PIECE_ELEMENTS)
            tensor[piece].copy_(block.tensor[piece])
            work.pause()
        with self._lock:
            is_moved = block.key not in self._in_use
            if is_moved:
                self._blocks[block.key] = replace(block, tensor=tensor, extent=target)
                self._changed.append(block.key)
        self._erase(block.extent if is_moved else target)

    def _size(self, files: BlockFiles, plan: BlockPlan) -> int:
        """The elements to reserve for a block of this plan."""
        return plan.num_elements

    def _reserve(self, key: AdapterKey, num_elements: int) -> Extent | None:
        """Room for a block, made by dropping blocks out of use. None if too many are in use, or if
        it is larger than the cache is now: then nothing is dropped."""
        with self._erasing:
            if num_elements > self._extents.capacity:
                return None
            while True:
                with self._lock:
                    extent = self._extents.allocate(num_elements, avoid=self._withheld)
                    victim = None if extent else self._pop_victim(key, num_elements)
                if victim is None:
                    return extent
                self._erase(victim.extent)

    def _pop_victim(self, newcomer: AdapterKey, num_elements: int) -> HostBlock | None:
        """Blocks of tenants above their share are evicted first, then the least recently used.

        Called with `_lock` held. None if every block is in use.
        """
        surplus = find_surplus(
            [
                Holding(key, block.extent.size, use, key not in self._in_use)
                for use, (key, block) in enumerate(self._blocks.items())
            ],
            capacity=self._extents.capacity,
            active=frozenset(key.tenant_id for key in self._blocks),
            newcomer=newcomer,
            newcomer_size=num_elements,
        )
        out_of_use = [key for key in self._blocks if key not in self._in_use]
        victim = next((key for key in out_of_use if key in surplus.keys), None)
        if victim is None:
            victim = next(iter(out_of_use), None)
        if victim is None:
            return None
        self._changed.append(victim)
        block = self._blocks.pop(victim)
        self._ghosts.add(victim, block.extent.size)
        return block

    def _erase(self, extent: Extent) -> None:
        """Zero and free an extent. The caller holds `_erasing`, so that no other thread sees a
        block that is partly dropped."""
        self._zero(extent)
        with self._lock:
            self._extents.free(extent)

    def _zero(self, extent: Extent) -> None:
        target, work = self._pool[extent.offset : extent.end], Paced(self._pace)
        for start in range(0, extent.size, PIECE_ELEMENTS):
            target[start : start + PIECE_ELEMENTS].zero_()
            work.pause()


def host_memory(num_elements: int, dtype: torch.dtype, *, page_locked: bool) -> Tensor:
    """Host memory `[num_elements]`: zeros, or page-locked with any content."""
    if page_locked:
        return torch.empty(num_elements, dtype=dtype, pin_memory=True)
    return untouched_zeros(num_elements, dtype)
