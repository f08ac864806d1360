"""The report on memory: the position of adapters and the use of KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...adapters.identity import AdapterKey
from ...adapters.manager import AdapterManager
from ..kv.blocks import KvBlocks
from ..messages import ExtentUse, HostUse, KvUse, LineUse, MemoryMap
from ..scheduling.scheduler import Scheduler


def map_memory(
    number: int,
    manager: AdapterManager[Any],
    scheduler: Scheduler,
    kv: KvBlocks,
    *,
    kv_block_bytes: Sequence[int],
) -> MemoryMap:
    """The answer to MapMemory; `kv_block_bytes` are those of each KV group."""
    group = kv.fullest_group
    pool = kv.pool_use(group)
    figures = manager.figures()
    return MemoryMap(
        number=number,
        extents=[ExtentUse(*entry) for entry in manager.extents()],
        host=[HostUse(*entry) for entry in manager.host_entries()],
        kv=KvUse(
            num_blocks=pool.num_usable,
            bytes_per_block=kv_block_bytes[group],
            num_empty=pool.num_free - pool.num_cached,
            num_cached=pool.num_cached,
            num_used=pool.num_usable - pool.num_free,
        ),
        lines=_lines(scheduler, kv, group),
        free_bytes=figures.free_bytes,
        largest_free_bytes=figures.largest_free_bytes,
        host_used_bytes=figures.host_bytes,
    )


def _lines(scheduler: Scheduler, kv: KvBlocks, group: int) -> list[LineUse]:
    """What each tenant's requests for each adapter hold, in the order of the first of them."""
    uses: dict[tuple[str, AdapterKey | None], tuple[int, int, int]] = {}
    for request in scheduler.requests():
        line = (request.tenant_id, request.line)
        num_running, num_waiting, num_blocks = uses.get(line, (0, 0, 0))
        if scheduler.is_running(request):
            num_held = kv.num_held(request.kv, group)
            uses[line] = num_running + 1, num_waiting, num_blocks + num_held
        else:
            uses[line] = num_running, num_waiting + 1, num_blocks
    return [LineUse(tenant_id, key, *use) for (tenant_id, key), use in uses.items()]
