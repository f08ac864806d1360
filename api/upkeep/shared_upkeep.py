"""The upkeep jobs that one server runs for all servers."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from ...platform.accounts import failures
from ...platform.adapters import upload_upkeep
from ...platform.base import utc_now
from ...platform.idempotency import service as idempotency
from ...platform.identities import service as identities
from ...platform.jobs import service as job_leases
from ...platform.overview import recent_requests
from ...platform.overview import service as samples
from ...platform.quotas import service as quotas
from ...platform.requests import upkeep as request_log
from ...platform.samples import service as request_samples
from ...platform.samples.sample_seal import SampleSeal
from ...platform.sessions import PlatformSession
from ...platform.webhooks import outbox
from ..adapters.lost_uploads import end_lost_uploads
from ..control_plane.control_plane import ControlPlane
from ..control_plane.jobs import Job
from .garbage import Garbage
from .tenant_deletions import erase_late_rows


class SharedUpkeep:
    """The jobs that keep the database and the store small."""

    def __init__(
        self,
        control_plane: ControlPlane,
        garbage: Garbage,
        *,
        request_log_days: int,
        upload_days: int,
        sample_days: int,
        seal: SampleSeal,
    ) -> None:
        """`request_log_days` and `upload_days`: how long entries and closed uploads are kept.
        `sample_days`: how long samples of requests may be kept, which `seal` encrypts."""
        self._control_plane = control_plane
        self._garbage = garbage
        self._request_log_age = timedelta(days=request_log_days)
        self._upload_age = timedelta(days=upload_days)
        self._sample_days = sample_days
        self._seal = seal

    def jobs(self) -> list[Job]:
        write = self._control_plane.write_all_tenants
        lost_uploads = partial(end_lost_uploads, self._control_plane)
        late_rows = partial(erase_late_rows, self._control_plane)
        minute, hour, day = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
        return [
            Job(name="garbage", every=day, run=self._garbage.collect_shared),
            Job(name="lost-uploads", every=5 * minute, run=lost_uploads),
            Job(name="closed-uploads", every=hour, run=self._purge_uploads),
            Job(name="request-log", every=hour, run=self._purge_request_log),
            Job(name="idempotent-answers", every=hour, run=partial(write, idempotency.purge)),
            Job(name="samples", every=hour, run=self._purge_samples),
            Job(name="request-samples", every=hour, run=self._tend_request_samples),
            Job(name="recent-requests", every=6 * hour, run=self._count_requests),
            Job(name="sign-ins", every=hour, run=self._purge_sign_ins),
            Job(name="reservations", every=day, run=partial(write, quotas.purge)),
            Job(name="deleted-tenants", every=day, run=late_rows),
            Job(name="webhooks", every=hour, run=self._tend_webhooks),
            Job(name="leases", every=day, run=partial(write, job_leases.purge)),
        ]

    async def _purge_uploads(self) -> None:
        before = utc_now() - self._upload_age
        await self._repeat(lambda session: upload_upkeep.purge(session, before))

    async def _purge_request_log(self) -> None:
        before = utc_now() - self._request_log_age
        await self._repeat(lambda session: request_log.purge(session, before))

    async def _purge_samples(self) -> None:
        await self._control_plane.write_all_tenants(
            lambda session: samples.purge(session, time.time())
        )

    async def _count_requests(self) -> None:
        for tenant_id in await self._control_plane.read_all_tenants(recent_requests.users):
            await self._control_plane.write_all_tenants(
                partial(recent_requests.recount, tenant_id=tenant_id)
            )

    async def _purge_sign_ins(self) -> None:
        write = self._control_plane.write_all_tenants
        await write(self._control_plane.accounts.purge)
        await write(lambda session: failures.purge(session, utc_now()))
        await write(identities.purge)

    async def _tend_webhooks(self) -> None:
        await self._repeat(outbox.purge)
        await self._control_plane.write_all_tenants(self._control_plane.webhooks.reseal)

    async def _tend_request_samples(self) -> None:
        now = utc_now()
        await self._repeat(lambda session: request_samples.purge(session, now, self._sample_days))
        last: str | None = ""
        while last is not None:
            reseal = partial(request_samples.reseal, seal=self._seal, after=last)
            last = await self._control_plane.write_all_tenants(reseal)

    async def _repeat(self, purge: Callable[[PlatformSession], int]) -> None:
        """Purge in transactions of bounded size, until one finds nothing."""
        while await self._control_plane.write_all_tenants(purge):
            pass
