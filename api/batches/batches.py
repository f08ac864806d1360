"""Works on the batches that no other server works on; one for the server.

The lease on a batch is renewed while this server works on it. If the server dies, another one takes
over when the lease has expired; the same server takes its own batches again at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import structlog

from ...platform.batches import service
from ...platform.batches.service import OpenBatch
from ..control_plane.control_plane import ControlPlane
from ..control_plane.leased_runs import LeasedRuns
from ..control_plane.leases import Leases
from ..control_plane.periodic import Periodic
from ..inference.metering import Metering
from ..telemetry.metrics import Metrics
from .call import App
from .run import BatchRun, RunServices
from .tenant_files import TenantFiles

log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0
"""How often a server looks for batches."""
MAX_RUNS = 4
"""Batches of one server at a time."""


class Batches:
    """Finds batches and runs them."""

    def __init__(
        self,
        *,
        control_plane: ControlPlane,
        leases: Leases,
        metering: Metering,
        files: TenantFiles,
        metrics: Metrics,
        is_draining: Callable[[], bool],
    ) -> None:
        self.files = files
        self._control_plane = control_plane
        self._runs: LeasedRuns[OpenBatch] = LeasedRuns(leases, "batch", lease_name)
        self._metering = metering
        self._metrics = metrics
        self._is_draining = is_draining
        self._services: RunServices | None = None
        self._looks = Periodic(
            self._look,
            seconds=LOOK_SECONDS,
            log=log,
            failed="batches_not_found",
            delayed="batches_delayed",
            at_once=True,
        )

    def start(self, app: App) -> None:
        """Answer lines by sending them to this application from now on."""
        self._services = RunServices(
            app, self._control_plane, self._metering, self.files, self._metrics
        )
        self._control_plane.wake_after(("batch.create", "evaluation.ask"), self._looks.wake)
        self._looks.start()

    async def close(self) -> None:
        """Stop running; other servers go on."""
        await self._looks.close()
        await self._runs.stop()
        self.files.close()

    async def _look(self) -> None:
        if self._is_draining():
            await self._runs.stop()
            return
        assert self._services is not None, "started"
        found = await self._control_plane.read_all_tenants(service.list_open_of_all_tenants)
        waiting = [batch for batch in found if batch not in self._runs]
        while waiting and len(self._runs) < MAX_RUNS:
            batch = min(waiting, key=self._num_runs_of)  # the oldest of the least served tenant
            waiting.remove(batch)
            await self._runs.begin(batch, BatchRun(self._services, batch).run)

    def _num_runs_of(self, batch: OpenBatch) -> int:
        return Counter(running.tenant_id for running in self._runs)[batch.tenant_id]


def lease_name(batch: OpenBatch) -> str:
    """The name of the lease on a batch."""
    return f"batch:{batch.batch_id}"
