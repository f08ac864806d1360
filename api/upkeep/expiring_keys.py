"""Counts the keys that expire soon without a successor."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

import structlog

from ...platform.base import utc_now
from ...platform.keys import repository as keys
from ...platform.operators import repository as operators
from ...platform.sessions import PlatformSession
from ..control_plane.control_plane import ControlPlane
from ..control_plane.periodic import Periodic
from ..telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

SOON = timedelta(days=7)
INTERVAL_SECONDS = 300.0


class Expiring(NamedTuple):
    """Usable keys that end within `SOON`."""

    of_tenants: int
    of_operators: int


class ExpiringKeys:
    """Counts periodically; one per server."""

    def __init__(self, *, control_plane: ControlPlane, metrics: Metrics) -> None:
        self._control_plane = control_plane
        self._metrics = metrics
        self._counts = Periodic(
            self.count,
            seconds=INTERVAL_SECONDS,
            log=log,
            failed="expiring_keys_not_counted",
            at_once=True,
        )

    def start(self) -> None:
        self._counts.start()

    async def close(self) -> None:
        await self._counts.close()

    async def count(self) -> Expiring:
        """Update the metric. Raises a PlatformError."""
        expiring = await self._control_plane.read_all_tenants(count_expiring)
        self._metrics.observe_expiring_keys("tenant", expiring.of_tenants)
        self._metrics.observe_expiring_keys("operator", expiring.of_operators)
        return expiring


def count_expiring(session: PlatformSession) -> Expiring:
    """The count from the database."""
    now = utc_now()
    until = now + SOON
    return Expiring(
        keys.count_ending_in_all_tenants(session, now, until),
        operators.count_ending(session, now, until),
    )
