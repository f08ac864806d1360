"""The report on memory: the position of adapters and the use of KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...adapters.identity import AdapterKey
from ...adapters.manager import AdapterManager, Tier
from ..kv.blocks import KvBlocks
from ..kv.group_blocks import GroupBlocks
from ..messages import AdapterKvUse, KvUse, MemoryMap
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
    group = max(kv.groups, key=lambda group: group.used_fraction)
    pool, num_cached = group.pool, group.cached.num_unheld
    tiers = manager.reports.tier_stats()
    return MemoryMap(
        number=number,
        extents=manager.reports.extents(),
        host=manager.reports.host_entries(),
        kv=KvUse(
            num_blocks=pool.num_usable,
            bytes_per_block=kv_block_bytes[group.index],
            num_empty=pool.num_free - num_cached,
            num_cached=num_cached,
            num_used=pool.num_usable - pool.num_free,
        ),
        lines=_lines(scheduler, group),
        free_bytes=tiers.free_bytes,
        largest_free_bytes=tiers.largest_free_bytes,
        arena_bytes=manager.arena_bytes,
        host_used_bytes=tiers.bytes_by_tier[Tier.HOST],
    )


def _lines(scheduler: Scheduler, group: GroupBlocks) -> list[AdapterKvUse]:
    """The KV blocks of each tenant's requests for each adapter, by their first request."""
    uses: dict[tuple[str, AdapterKey | None], tuple[int, int, int]] = {}
    for request in scheduler.requests():
        line = (request.tenant_id, request.adapter)
        num_running, num_waiting, num_blocks = uses.get(line, (0, 0, 0))
        if scheduler.is_running(request):
            uses[line] = num_running + 1, num_waiting, num_blocks + group.num_held(request.kv)
        else:
            uses[line] = num_running, num_waiting + 1, num_blocks
    return [AdapterKvUse(tenant_id, key, *use) for (tenant_id, key), use in uses.items()]
