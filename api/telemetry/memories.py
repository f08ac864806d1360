"""The memory maps of this server and of the other live servers.

This server's engine is queried directly; the other servers store their maps in the database. A
server stores its map only while another server could read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from ...adapters.disk_cache import CachedFile, DiskCacheStats, list_cached_files
from ...adapters.identity import AdapterKey
from ...engine.errors import EngineError
from ...engine.messages import MemoryMap
from ...engine.process.client import EngineClient
from ...platform.base import utc_now
from ...platform.overview.models import ServerMemory
from ...platform.servers import service as servers
from ...platform.sessions import PlatformSession
from ..control_plane.control_plane import ControlPlane
from ..schemas.memory_tiers import BorderView, PrefixTierView
from .trainer_memories import TrainerMemories, TrainerMemory

STALE_AFTER = timedelta(seconds=60)
"""Maps that are older than this are not shown."""


class ServerMap(msgspec.Struct, frozen=True):
    """One server's memory map, as stored for the other servers."""

    device: str
    arena_bytes: int
    kv_block_size: int
    host_capacity_bytes: int
    disk_capacity_bytes: int
    disk_used_bytes: int
    engine: MemoryMap
    disk: Mapping[str, CachedFile]
    """By file name."""
    plan: Sequence[str] = ()
    """The lines of the engine's memory plan."""
    trainers: Sequence[TrainerMemory] = ()
    """Of the server's fine-tuning jobs."""
    prefixes: Sequence[PrefixTierView] = ()
    """Empty before the engine's first statistics."""
    border: BorderView | None = None
    """Likewise None."""


class SeenMap(NamedTuple):
    """One server's memory map at some time."""

    server_id: str
    """In a fleet, the replica's address."""
    seen_at: datetime
    content: ServerMap


class Memories(Protocol):
    """The memory maps that a server shows and counts."""

    async def counted(self) -> Sequence[ServerMap]:
        """The current maps that this server counts; no other server counts them."""

    async def all(self) -> list[SeenMap]:
        """The maps of all live servers, or of all replicas. Raises a PlatformError."""

    def write(self, session: PlatformSession, maps: Sequence[ServerMap]) -> None:
        """Store the counted maps for other servers, if they need them."""


class ServerMemories(Memories):
    """Of servers with engines of their own; one per server."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        disk_stats: Callable[[], DiskCacheStats],
        cache_directory: Path,
        control_plane: ControlPlane,
        server_id: str,
        trainers: TrainerMemories,
    ) -> None:
        self._engine = engine
        self._trainers = trainers
        self._disk_stats = disk_stats
        self._cache_directory = cache_directory
        self._control_plane = control_plane
        self._server_id = server_id

    async def counted(self) -> Sequence[ServerMap]:
        own = await self._own()
        return [] if own is None else [own]

    async def _own(self) -> ServerMap | None:
        """This server's current map; None while its engine is down."""
        try:
            mapped = await self._engine.map_memory()
        except EngineError:
            return None
        info, stats, disk = self._engine.info, self._engine.stats, self._disk_stats()
        return ServerMap(
            device=info.device,
            arena_bytes=mapped.arena_bytes,
            kv_block_size=info.kv_block_size,
            host_capacity_bytes=info.host_cache_bytes,
            disk_capacity_bytes=disk.capacity_bytes,
            disk_used_bytes=disk.used_bytes,
            engine=mapped,
            disk=await asyncio.to_thread(list_cached_files, self._cache_directory),
            plan=info.memory_plan,
            trainers=self._trainers.measure(),
            prefixes=PrefixTierView.tiers_of(stats),
            border=BorderView.of(stats) if stats else None,
        )

    async def all(self) -> list[SeenMap]:
        own = await self._own()
        others = await self._control_plane.read_all_tenants(self._read_others)
        found = [*others, *([SeenMap(self._server_id, utc_now(), own)] if own else [])]
        return sorted(found, key=lambda seen: seen.server_id)

    def write(self, session: PlatformSession, maps: Sequence[ServerMap]) -> None:
        for own in maps:
            self._write(session, own)

    def _write(self, session: PlatformSession, own: ServerMap) -> None:
        """Store the map for other servers, if there are any."""
        row = session.get(ServerMemory, self._server_id, with_for_update=True)
        if not self._has_others(session):
            if row is not None:
                session.delete(row)
            return
        if row is None:
            row = ServerMemory(server_id=self._server_id)
            session.add(row)
        row.seen_at, row.content = utc_now(), msgspec.to_builtins(own)

    def _has_others(self, session: PlatformSession) -> bool:
        now = utc_now()
        return any(
            server.id != self._server_id and servers.is_live(server, now)
            for server in servers.list_servers(session)
        )

    def _read_others(self, session: PlatformSession) -> list[SeenMap]:
        oldest = utc_now() - STALE_AFTER
        live = {s.id for s in servers.list_servers(session) if servers.is_live(s, utc_now())}
        found = []
        for server_id in sorted(live - {self._server_id}):
            row = session.get(ServerMemory, server_id)
            if row is None or row.seen_at < oldest:
                continue
            try:
                content = msgspec.convert(row.content, ServerMap)
            except msgspec.ValidationError:  # of another version of this software
                continue
            found.append(SeenMap(server_id, row.seen_at, content))
        return found


def keys_in(content: ServerMap) -> set[AdapterKey]:
    """The adapters that this server's engine holds."""
    engine = content.engine
    named = {line.adapter for line in engine.lines if line.adapter is not None}
    return {each.key for each in engine.extents} | {each.key for each in engine.host} | named
