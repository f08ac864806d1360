"""Whether a tenant's request may run: reserved before the engine hears of it, or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

from ...platform.errors import DatabaseUnavailable, LimitReached
from ...platform.quotas import service as quotas
from ...platform.quotas.service import Demand, Standing
from ..control_plane import ControlPlane
from ..request_measures import RequestMeasures
from .ledger_writer import LedgerWriter

log = structlog.get_logger(__name__)

RELEASE_RETRY_SECONDS = 5.0


class Admission:
    """Reserves for requests; one for the server.

    Who is admitted is settled by its account, in the transaction that writes the ledger's row.
    """

    def __init__(self, control_plane: ControlPlane, ledger: LedgerWriter, server_id: str) -> None:
        self._control_plane = control_plane
        self._ledger = ledger
        self._server_id = server_id
        self._releases: set[asyncio.Task[None]] = set()

    async def admit(self, tenant_id: str, demand: Demand, measures: RequestMeasures) -> None:
        """Reserve what the request may use; notes in `measures` what is left of the rates.

        Raises a LimitReached or DatabaseUnavailable; then, and if it is cancelled, nothing stays
        reserved, nor of a tenant whose requests nothing limits.
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

    async def recover(self) -> None:
        """Release what an earlier process reserved and no account is open for.

        To be called once the accounts that it left are settled. Raises DatabaseUnavailable.
        """
        left = await self._control_plane.read_all_tenants(
            lambda session: quotas.list_of_server(session, self._server_id)
        )
        for reservation in left:
            await self._release(reservation.tenant_id, reservation.request_id)

    async def close(self) -> None:
        """Give up what waits for the database; it is settled after the next start."""
        for task in self._releases:
            task.cancel()
        await asyncio.gather(*self._releases, return_exceptions=True)

    def _undo(self, tenant_id: str, demand: Demand, reserving: asyncio.Future[Standing]) -> None:
        if reserving.cancelled():
            return
        failure = reserving.exception()
        # A database that went away may have committed before.
        if failure is None or isinstance(failure, DatabaseUnavailable):
            self._spawn(self._release(tenant_id, demand.request_id))

    async def _release(self, tenant_id: str, request_id: str) -> None:
        try:
            await self._control_plane.write_plain(
                tenant_id, lambda session: quotas.release(session, request_id)
            )
        except DatabaseUnavailable:
            log.warning("release_delayed", tenant_id=tenant_id, request_id=request_id)
            self._spawn(self._release_later(tenant_id, request_id))

    async def _release_later(self, tenant_id: str, request_id: str) -> None:
        await asyncio.sleep(RELEASE_RETRY_SECONDS)
        await self._release(tenant_id, request_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        return task
