"""Measures byte-seconds of each tenant's adapters on the device, for the ledger's daily sums."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, date, datetime, timedelta

import structlog

from ...adapters.identity import AdapterKey
from ...adapters.manager import Tier
from ...engine.messages import EngineStats
from ...platform.base import utc_now
from ...platform.errors import PlatformError
from ...platform.sessions import TenantSession
from ...platform.usage import service as ledger
from ...platform.usage.repository import DeviceUsage
from ..control_plane.control_plane import ControlPlane
from ..control_plane.periodic import Periodic

log = structlog.get_logger(__name__)

WRITE_SECONDS = 60.0
LOOK_SECONDS = 0.5
"""As often as the engine's snapshots."""


class DeviceUsageSums:
    """Byte-seconds by day and content: an observed state counts until the next observation."""

    def __init__(
        self,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._monotonic = monotonic
        self._now = now
        self._looked_at: float | None = None
        self._held: Mapping[AdapterKey, int] = {}
        self._byte_seconds: defaultdict[tuple[date, AdapterKey], float] = defaultdict(float)

    def look(self, held: Mapping[AdapterKey, int]) -> None:
        """These bytes are on the device now."""
        moment, now = self._monotonic(), self._now().astimezone(UTC)
        if self._looked_at is not None:
            for day, seconds in _by_day(now, moment - self._looked_at):
                for key, num_bytes in self._held.items():
                    self._byte_seconds[day, key] += num_bytes * seconds
        self._looked_at, self._held = moment, held

    def take(self) -> dict[str, list[DeviceUsage]]:
        """The sums since the last call, by tenant; fractions are kept."""
        taken: defaultdict[str, list[DeviceUsage]] = defaultdict(list)
        for (day, key), amount in list(self._byte_seconds.items()):
            whole = int(amount)
            self._byte_seconds[day, key] -= whole
            if whole:
                taken[key.tenant_id].append(DeviceUsage(day, key.digest, whole))
            if key not in self._held:
                del self._byte_seconds[day, key]
        return taken

    def put_back(self, tenant_id: str, usages: list[DeviceUsage]) -> None:
        """Restore sums that could not be written."""
        for usage in usages:
            key = AdapterKey(tenant_id, usage.digest)
            self._byte_seconds[usage.day, key] += usage.byte_seconds


def _by_day(now: datetime, seconds: float) -> list[tuple[date, float]]:
    """This many seconds before `now`, split at midnight."""
    parts = []
    end = now
    while seconds > 0:
        day = (end - timedelta(microseconds=1)).date()
        midnight = datetime(day.year, day.month, day.day, tzinfo=UTC)
        of_day = min(seconds, (end - midnight).total_seconds())
        parts.append((day, of_day))
        seconds -= of_day
        end = midnight
    return parts


class DeviceUsageMeter:
    """Observes the engine's resident adapters and adds them to the sums; one per server."""

    def __init__(
        self,
        stats: Callable[[], EngineStats | None],
        control_plane: ControlPlane,
        *,
        is_ours: Callable[[], Awaitable[bool]],
    ) -> None:
        """`stats` returns the engine's last snapshot, or None without an engine. `is_ours`: whether
        this server writes what it has observed since the last time, and no other does."""
        self._is_ours = is_ours
        self._stats = stats
        self._control_plane = control_plane
        self._integral = DeviceUsageSums()
        self._looks = Periodic(
            self._look,
            seconds=LOOK_SECONDS,
            log=log,
            failed="device_usage_not_observed",
            at_once=True,
        )
        self._writes = Periodic(
            self._write, seconds=WRITE_SECONDS, log=log, failed="device_usage_not_recorded"
        )

    def start(self) -> None:
        self._looks.start()
        self._writes.start()

    async def close(self) -> None:
        """Write the pending sums."""
        if self._looks.is_started:
            await self._looks.close()
            await self._writes.close()
            await self._write()

    async def _look(self) -> None:
        self._integral.look(_held(self._stats()))

    async def _write(self) -> None:
        is_ours = await self._is_ours()
        taken = self._integral.take()
        for tenant_id, usages in taken.items() if is_ours else ():

            def add(session: TenantSession, usages: list[DeviceUsage] = usages) -> None:
                ledger.add_device_usage(session, usages)

            try:
                await self._control_plane.write(tenant_id, add)
            except PlatformError as exc:
                self._integral.put_back(tenant_id, usages)
                log.warning("device_usage_not_recorded", error=str(exc))
            except Exception:  # a defect for one tenant must not affect the others
                log.exception("device_usage_not_recorded")


def _held(stats: EngineStats | None) -> dict[AdapterKey, int]:
    """Bytes by adapter version; those of a composition are its members' in equal parts."""
    if stats is None:
        return {}
    held: Counter[AdapterKey] = Counter()
    for entry in stats.adapters:
        if entry.tier is Tier.DEVICE:
            parts = entry.key.parts
            held.update(dict.fromkeys(parts, entry.device_bytes // len(parts)))
    return held
