"""Writes this server's figures to the database every 15 seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from ...engine.messages import MemoryMap
from ...platform.base import utc_now
from ...platform.errors import PlatformError
from ...platform.overview import service
from ...platform.overview.figures import FigureSums
from ...platform.overview.latencies import bucket_of
from ...platform.overview.service import Gathered, UseSums
from ...platform.sessions import PlatformSession
from ..control_plane.control_plane import ControlPlane
from ..control_plane.periodic import Periodic
from .memories import Memories, ServerMap
from .request_measures import CLIENT_DISCONNECTED, RequestMeasures

log = structlog.get_logger(__name__)

INTERVAL_SECONDS = 15.0
FRESH_SECONDS = 1.0
"""The maximum age of the figures that a reader sees."""


class Overview:
    """Gathers figures by tenant; one for the server."""

    def __init__(
        self,
        control_plane: ControlPlane,
        memories: Memories,
        server_id: str,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._control_plane = control_plane
        self._memories = memories
        self._server_id = server_id
        self._monotonic = monotonic
        self._now = now
        self._gathered = Gathered()
        self._gathered_since = monotonic()
        self._writing = asyncio.Lock()
        self._flushes = Periodic(
            self.flush,
            seconds=INTERVAL_SECONDS,
            log=log,
            failed="overview_not_written",
            by_clock=True,
        )

    def start(self) -> None:
        self._gathered_since = self._monotonic()
        self._flushes.start()

    async def close(self) -> None:
        """Write the pending figures."""
        if self._flushes.is_started:
            await self._flushes.close()
            await self.flush()

    def of_tenant(self, tenant_id: str) -> FigureSums:
        """The sums of the tenant's tokens; request them again for each step."""
        tenants = self._gathered.tenants
        figures = tenants.get(tenant_id)
        if figures is None:
            figures = tenants[tenant_id] = FigureSums()
        return figures

    def observe_request(
        self, tenant_id: str, *, code: str, seconds: float, measures: RequestMeasures
    ) -> None:
        """Count a generation that has ended."""
        figures = self.of_tenant(tenant_id)
        figures.num_requests += 1
        figures.num_errors += bool(code) and code != CLIENT_DISCONNECTED
        figures.prompt_tokens += measures.prompt_tokens or 0
        figures.num_cold_loads += bool(measures.load_ms)
        if measures.adapter_name is not None and measures.first_token_seconds is not None:
            use = self._gathered.uses.setdefault(
                (tenant_id, measures.adapter_name), UseSums(utc_now())
            )
            use.last_used_at = utc_now()
            bucket = bucket_of(1000 * seconds)
            use.latency_counts[bucket] = use.latency_counts.get(bucket, 0) + 1

    async def freshen(self) -> None:
        """Write the pending figures if the last write is too old."""
        if self._monotonic() - self._gathered_since >= FRESH_SECONDS:
            await self.flush()

    async def flush(self) -> None:
        """Write the pending figures. Figures that cannot be written are dropped."""
        async with self._writing:
            counted = await self._memories.counted()
            gathered, self._gathered = self._gathered, Gathered()
            since, self._gathered_since = self._gathered_since, self._monotonic()
            elapsed = self._gathered_since - since
            for each in counted:
                _add_levels(gathered, each, elapsed)
            for figures in gathered.tenants.values():
                _add_work(gathered.server, figures)
            gathered.tenants = {t: f for t, f in gathered.tenants.items() if not f.is_empty}
            await self._write(gathered, counted, self._now() - elapsed / 2)

    async def _write(self, gathered: Gathered, counted: Sequence[ServerMap], moment: float) -> None:
        def write(session: PlatformSession) -> None:
            service.add(session, self._server_id, moment, gathered)
            self._memories.write(session, counted)

        try:
            await self._control_plane.write_all_tenants(write)
        except PlatformError as exc:
            log.warning("overview_not_written", error=str(exc))
        except Exception:  # a defect here must not stop later writes
            log.exception("overview_not_written")


def _add_levels(gathered: Gathered, own: ServerMap, seconds: float) -> None:
    """Add the current levels for the time since the last observation."""
    mapped = own.engine
    gathered.kv_capacity_seconds += mapped.kv.num_blocks * seconds
    server = gathered.server
    server.kv_block_seconds += mapped.kv.num_used * seconds
    server.adapter_byte_seconds += (own.arena_bytes - mapped.free_bytes) * seconds
    for line in mapped.lines:
        figures = gathered.tenants.setdefault(line.tenant_id, FigureSums())
        figures.running_seconds += line.num_running * seconds
        figures.waiting_seconds += line.num_waiting * seconds
        figures.kv_block_seconds += line.num_kv_blocks * seconds
    for tenant_id, num_bytes in device_bytes(mapped).items():
        figures = gathered.tenants.setdefault(tenant_id, FigureSums())
        figures.adapter_byte_seconds += num_bytes * seconds


def device_bytes(mapped: MemoryMap) -> dict[str, int]:
    """The bytes of adapters in the arena, by tenant id."""
    found: dict[str, int] = {}
    for extent in mapped.extents:
        found[extent.key.tenant_id] = found.get(extent.key.tenant_id, 0) + extent.num_bytes
    return found


def _add_work(server: FigureSums, figures: FigureSums) -> None:
    """Add a tenant's figures, except levels, which are counted for the whole server."""
    held = server.kv_block_seconds, server.adapter_byte_seconds
    server.add(figures)
    server.kv_block_seconds, server.adapter_byte_seconds = held
