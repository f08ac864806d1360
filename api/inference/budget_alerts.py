"""Announces alerts of budgets: soon after they are written, and those that a crash left."""

from __future__ import annotations

import asyncio

import structlog

from ...platform.audit.event import BY_SYSTEM, Changed
from ...platform.budgets import repository as budgets
from ...platform.budgets.alerts import announce_next
from ...platform.errors import PlatformError
from ...platform.sessions import TenantSession
from ..control_plane.control_plane import ControlPlane
from ..control_plane.periodic import Periodic
from ..telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

SWEEP_SECONDS = 60.0


class BudgetAlerts:
    """Enters alerts in the audit log and counts them; one per server.

    Servers lock an alert while they announce it, so each is announced once.
    """

    def __init__(self, control_plane: ControlPlane, metrics: Metrics) -> None:
        self._control_plane = control_plane
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeps = Periodic(
            self.announce_left,
            seconds=SWEEP_SECONDS,
            log=log,
            failed="budget_alerts_failed",
            delayed="budget_alerts_delayed",
        )

    def start(self) -> None:
        self._sweeps.start()

    async def close(self) -> None:
        """Abandon running announcements; the next sweep, of this server or another, makes them."""
        await self._sweeps.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def announce_soon(self, tenant_id: str) -> None:
        """Announce what this tenant has."""
        task = asyncio.create_task(self._announce_or_leave(tenant_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def announce_left(self) -> None:
        """Announce what all tenants have. Raises a PlatformError."""
        for tenant_id in await self._control_plane.read_all_tenants(budgets.list_tenants_to_alert):
            await self._announce(tenant_id)

    async def _announce_or_leave(self, tenant_id: str) -> None:
        try:
            await self._announce(tenant_id)
        except PlatformError as exc:
            log.warning("budget_alerts_delayed", error=str(exc))
        except Exception:  # a background task: the next sweep repeats it
            log.exception("budget_alerts_failed")

    async def _announce(self, tenant_id: str) -> None:
        while await self._announce_one(tenant_id):
            self._metrics.usage.observe_budget_alert()

    async def _announce_one(self, tenant_id: str) -> bool:
        """False if there is none."""

        def change(session: TenantSession) -> Changed[bool]:
            event = announce_next(session)
            return Changed(event is not None, event)

        return await self._control_plane.change(tenant_id, BY_SYSTEM, change)
