"""Works on the batches that no other server works on; one for the server.

The lease on a batch is renewed while this server works on it. If the server dies, another one takes
over when the lease has expired; the same server takes its own batches again at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import structlog

from ...adapters.errors import AdapterError
from ...platform.batches import service
from ...platform.batches.service import OpenBatch
from ...platform.errors import PlatformError
from ..control_plane.control_plane import ControlPlane
from ..control_plane.leases import LeaseLost, Leases
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
RETRY = timedelta(seconds=10)
"""After a failure, of the database or the store for example."""


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
        self._leases = leases
        self._metering = metering
        self._metrics = metrics
        self._is_draining = is_draining
        self._runs: dict[OpenBatch, asyncio.Task[None]] = {}
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
        self._looks.start()

    async def close(self) -> None:
        """Stop running; other servers go on."""
        await self._looks.close()
        await self._stop_runs()
        self.files.close()

    async def _look(self) -> None:
        if self._is_draining():
            await self._stop_runs()
            return
        found = await self._control_plane.read_all_tenants(service.list_open_of_all_tenants)
        waiting = [batch for batch in found if batch not in self._runs]
        while waiting and len(self._runs) < MAX_RUNS:
            batch = min(waiting, key=self._num_runs_of)  # the oldest of the least served tenant
            waiting.remove(batch)
            if await self._leases.claim(lease_name(batch)):
                self._runs[batch] = asyncio.create_task(self._run(batch))

    def _num_runs_of(self, batch: OpenBatch) -> int:
        return Counter(running.tenant_id for running in self._runs)[batch.tenant_id]

    async def _run(self, batch: OpenBatch) -> None:
        assert self._services is not None, "started"
        name, bound = lease_name(batch), log.bind(batch=batch.batch_id)
        pause = RETRY
        try:
            await self._leases.keep(name, BatchRun(self._services, batch).run())
            await self._leases.forget(name)
            bound.info("batch_ended")
            return
        except LeaseLost:
            bound.warning("batch_taken_over")
            return
        except asyncio.CancelledError:
            pause = timedelta(0)
            raise
        except (PlatformError, AdapterError) as exc:
            bound.warning("batch_delayed", error=str(exc))
        except Exception:  # a defect in one batch must not stop the others
            bound.exception("batch_failed_unexpectedly")
        finally:
            del self._runs[batch]
            with suppress(PlatformError):  # it expires
                await self._leases.postpone(name, pause)

    async def _stop_runs(self) -> None:
        runs = list(self._runs.values())
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)


def lease_name(batch: OpenBatch) -> str:
    """The name of the lease on a batch."""
    return f"batch:{batch.batch_id}"
