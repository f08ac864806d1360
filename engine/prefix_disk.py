"""Opens the tier of cached prefixes on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from ..adapters.loaders import Pace
from .config import EngineConfig
from .errors import InvalidParameter
from .kv.blocks import KvBlocks
from .kv.cache import KvCache
from .kv.disk_blocks import DiskBlocks
from .kv.disk_store import DiskStore, GroupFile
from .kv.layout import KvGroup
from .kv.prefix_file import file_bytes_per_slot
from .memory.plan import MemoryPlan

TYPICAL_TOKENS = 2048
"""Of a prompt whose prefix is worth reading from the disk."""


def open_prefix_disk(
    config: EngineConfig,
    plan: MemoryPlan,
    kv: KvBlocks,
    cache: KvCache,
    *,
    runtime_id: str,
    tier_key: bytes,
    pace: Pace,
) -> DiskStore:
    """Open the files, and let the KV cache use them. A disk that fails turns the tier off. Raises
    InvalidParameter without a folder."""
    if config.prefix_disk_dir is None:
        raise InvalidParameter("prefix_disk_dir", "is required with --prefix-disk-gib")
    block_bytes = cache.block_bytes
    num_slots = divide_disk(
        config.prefix_disk_bytes, plan.kv_groups, block_bytes, config.kv_block_size
    )
    store = DiskStore(
        Path(config.prefix_disk_dir),
        list(map(GroupFile, num_slots, block_bytes)),
        tier_key=tier_key,
        identity=_identity(config, plan, block_bytes, num_slots, runtime_id, cache.device.type),
        pace=pace,
    )
    cache.disk = DiskBlocks(store)
    kv.use_disk(store, (0,) * len(num_slots) if store.is_off else num_slots, block_bytes)
    return store


def divide_disk(
    num_bytes: int, groups: tuple[KvGroup, ...], block_bytes: tuple[int, ...], block_size: int
) -> tuple[int, ...]:
    """Slots per group in so many bytes, in the proportion in which a sequence of `TYPICAL_TOKENS`
    holds blocks.

    The device's own proportion depends on the memory that is free at the start, and other sizes
    would be another tier.
    """
    num_held = [group.peak_blocks(TYPICAL_TOKENS, block_size, block_size) for group in groups]
    total = sum(
        count * file_bytes_per_slot(size) for count, size in zip(num_held, block_bytes, strict=True)
    )
    return tuple(count * num_bytes // total for count in num_held)


def _identity(
    config: EngineConfig,
    plan: MemoryPlan,
    block_bytes: tuple[int, ...],
    num_slots: tuple[int, ...],
    runtime_id: str,
    device: str,
) -> str:
    """A name for everything that decides over the content, the form and the place of a block."""
    groups = [
        (group.layers, group.window, group.sinks, group.holds_states) for group in plan.kv_groups
    ]
    fields = (
        "loraplex prefixes v1",
        runtime_id,
        torch.__version__,
        device,
        config.kv_block_size,
        groups,
        block_bytes,
        num_slots,
    )
    return hashlib.sha256(repr(fields).encode()).hexdigest()[:32]
