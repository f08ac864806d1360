"""The memory maps of a fleet's replicas, which every server asks for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ...engine.errors import EngineError
from ...engine.fleet.fleet import Fleet
from ...engine.fleet.replica_link import ReplicaLink
from ...platform.base import utc_now
from ...platform.errors import PlatformError
from ...platform.sessions import PlatformSession
from ..schemas.memory_tiers import BorderView, PrefixTierView
from .memories import Memories, SeenMap, ServerMap


class FleetMemories(Memories):
    """One per server. A replica's disk is not shown: its agent does not report it."""

    def __init__(self, fleet: Fleet, *, is_ours: Callable[[], Awaitable[bool]]) -> None:
        """`is_ours`: whether this server counts what replicas hold, and no other does."""
        self._fleet = fleet
        self._is_ours = is_ours

    async def counted(self) -> Sequence[ServerMap]:
        try:
            is_ours = await self._is_ours()
        except PlatformError:  # nothing could be written either
            return []
        return [seen.content for seen in await self.all()] if is_ours else []

    async def all(self) -> list[SeenMap]:
        found = await asyncio.gather(*map(_map_of, self._fleet.links))
        return [seen for seen in found if seen is not None]

    def write(self, session: PlatformSession, maps: Sequence[ServerMap]) -> None:
        """Nothing: the other servers ask the replicas too."""


async def _map_of(link: ReplicaLink) -> SeenMap | None:
    try:
        mapped = await link.map_memory()
    except EngineError:
        return None
    info, stats = link.info, link.stats
    if info is None:
        return None
    content = ServerMap(
        device=info.device,
        arena_bytes=mapped.arena_bytes,
        kv_block_size=info.kv_block_size,
        host_capacity_bytes=info.host_cache_bytes,
        disk_capacity_bytes=0,
        disk_used_bytes=0,
        engine=mapped,
        disk={},
        plan=info.memory_plan,
        prefixes=PrefixTierView.tiers_of(stats),
        border=BorderView.of(stats) if stats else None,
    )
    return SeenMap(link.member.address, utc_now(), content)
