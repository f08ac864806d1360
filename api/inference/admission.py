"""Admission: reserves a tenant's quota before a request reaches the engine, or refuses it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from ...platform.errors import LimitReached, PlatformError
from ...platform.quotas import service as quotas
from ...platform.quotas.service import Demand, Standing
from ..control_plane.control_plane import ControlPlane
from ..control_plane.periodic import Periodic
from ..telemetry.request_measures import RequestMeasures
from .ledger_writer import LedgerWriter

log = structlog.get_logger(__name__)

SWEEP_SECONDS = 20.0


class Admission:
    """Reserves quota for requests; one per server.

    An admitted request is settled by its account, in the transaction that writes the ledger's row.
    """

    def __init__(
        self,
        control_plane: ControlPlane,
        ledger: LedgerWriter,
        server_id: str,
        *,
        is_open: Callable[[str], bool],
    ) -> None:
        """`is_open`: whether the request of this id has an account that is not settled."""
        self._control_plane = control_plane
        self._ledger = ledger
        self._server_id = server_id
        self._is_open = is_open
        self._releases: set[asyncio.Task[None]] = set()
        self._sweeps = Periodic(
            self.sweep,
            seconds=SWEEP_SECONDS,
            log=log,
            failed="sweep_failed",
            delayed="sweep_delayed",
        )

    async def admit(self, tenant_id: str, demand: Demand, measures: RequestMeasures) -> None:
        """Reserve what the request may use; stores the remaining rates in `measures`.

        Raises a LimitReached or DatabaseUnavailable. Then nothing is reserved, nor if it is
        cancelled, nor for a tenant without request limits. If the reservation is committed all the
        same, a sweep releases it, unless an open account settles it.
        """
        reserving = self._ledger.reserve(tenant_id, demand, self._server_id)
        try:
            measures.standing = await asyncio.shield(reserving)
        except LimitReached as exc:
            measures.standing = exc.standing
            raise
        except asyncio.CancelledError:
            reserving.add_done_callback(lambda done: self._undo(tenant_id, demand, done))
            raise

    def start(self) -> None:
        self._sweeps.start()

    async def close(self) -> None:
        """Abandon running releases; the next sweep, of this process or another, finds them."""
        await self._sweeps.close()
        releases = list(self._releases)
        for release in releases:
            release.cancel()
        await asyncio.gather(*releases, return_exceptions=True)

    async def sweep(self) -> None:
        """Release this server's reservations for requests without an open account.

        An account exists from before its reservation until the reservation is settled. A
        reservation without one was made by an earlier process, was committed late by an abandoned
        transaction, or could not be released before. Raises a PlatformError.
        """
        left = await self._control_plane.read_all_tenants(
            lambda session: quotas.list_of_server(session, self._server_id)
        )
        for reservation in left:
            if not self._is_open(reservation.request_id):
                await self._release(reservation.tenant_id, reservation.request_id)

    def _undo(self, tenant_id: str, demand: Demand, reserving: asyncio.Future[Standing]) -> None:
        if reserving.cancelled() or isinstance(reserving.exception(), LimitReached):
            return
        task = asyncio.create_task(self._release(tenant_id, demand.request_id))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, tenant_id: str, request_id: str) -> None:
        """If it fails, the next sweep releases the reservation."""
        try:
            await self._control_plane.write_plain(
                tenant_id, lambda session: quotas.release(session, request_id)
            )
        except PlatformError as exc:
            log.warning("release_delayed", request_id=request_id, error=str(exc))
        except Exception:  # a background task: the next sweep repeats it
            log.exception("release_failed", request_id=request_id)
