"""Sends the due deliveries that no other server sends; one for the server.

Tenants take turns, and each has a bounded number of deliveries at once: a target that is slow or
does not answer delays no other tenant's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial

import structlog

from ...adapters.failpoints import failpoint
from ...platform.audit.event import BY_SYSTEM, Changed, Event
from ...platform.base import utc_now
from ...platform.errors import PlatformError
from ...platform.sessions import TenantSession
from ...platform.webhooks import outbox
from ...platform.webhooks.event_types import Failure
from ...platform.webhooks.outbox import Attempt, Due
from ..control_plane.control_plane import ControlPlane
from ..control_plane.database_watch import until_answered
from ..control_plane.periodic import Periodic
from ..telemetry.metrics import Metrics
from .egress_client import EgressClient, EgressEnded
from .sender import MAX_AT_ONCE, SEND_SECONDS, Answered

log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0
"""How often a server looks for due deliveries."""
PER_TENANT = 4
"""Deliveries of one tenant at once."""
PER_ENDPOINT = 2
USER_AGENT = "loraplex-webhooks"

Record = Callable[[TenantSession, Attempt], None]


class Deliveries:
    """Claims due deliveries, signs and sends them, and records the results."""

    def __init__(
        self,
        *,
        control_plane: ControlPlane,
        server_id: str,
        egress: EgressClient,
        metrics: Metrics,
    ) -> None:
        self._control_plane = control_plane
        self._server_id = server_id
        self._egress = egress
        self._metrics = metrics
        self._running: dict[asyncio.Task[None], Due] = {}
        self._looks = Periodic(
            self._look,
            seconds=LOOK_SECONDS,
            log=log,
            failed="webhooks_not_found",
            delayed="webhooks_delayed",
            at_once=True,
        )

    async def start(self) -> None:
        """Take up what this server was sending when it stopped, and look for more from now on.

        Raises a PlatformError.
        """
        self._egress.start()
        await self._recover()
        self._looks.start()

    async def close(self) -> None:
        """Let running deliveries end; other servers send the rest."""
        await self._looks.close()
        if self._running:
            await asyncio.wait(self._running, timeout=SEND_SECONDS)
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._egress.close()
        if self._looks.is_started:
            await self._release()

    async def _release(self) -> None:
        try:
            await self._recover()
        except PlatformError as exc:  # other servers wait until their time is over
            log.warning("webhooks_not_released", error=str(exc))

    async def _recover(self) -> None:
        await self._control_plane.write_all_tenants(
            lambda session: outbox.recover(session, self._server_id)
        )

    async def _look(self) -> None:
        if not self._egress.is_ready:
            return
        room = MAX_AT_ONCE - len(self._running)
        due = await self._control_plane.read_all_tenants(
            lambda session: outbox.list_due(session, PER_ENDPOINT)
        )
        chosen = choose(due, self._running.values(), room)
        if not chosen:
            return
        ids = [each.delivery_id for each in chosen]
        attempts = await self._control_plane.write_all_tenants(
            lambda session: outbox.claim(session, ids, self._server_id)
        )
        failpoint("webhooks.claimed")
        for attempt in attempts:
            task = asyncio.create_task(self._work(attempt))
            self._running[task] = Due(
                attempt.delivery.id, attempt.endpoint.id, attempt.delivery.tenant_id
            )
            task.add_done_callback(self._running.pop)

    async def _work(self, attempt: Attempt) -> None:
        try:
            await self._send(attempt)
        except Exception:  # a defect for one delivery must not stop the others
            log.exception("webhook_failed_unexpectedly", delivery=attempt.delivery.id)

    async def _send(self, attempt: Attempt) -> None:
        delivery, endpoint = attempt.delivery, attempt.endpoint
        secrets = self._control_plane.webhooks.secrets
        signed = secrets.sign(endpoint, delivery.event_id, delivery.body, utc_now())
        if signed is None:
            log.warning("webhook_secret_unreadable", webhook=endpoint.id)
            await self._record(attempt, outbox.put_back)
            return
        headers = {"content-type": "application/json", "user-agent": USER_AGENT, **signed}
        try:
            answered = await self._egress.deliver(endpoint.url, headers, delivery.body)
        except EgressEnded:
            self._metrics.webhooks.note("broken_off")
            await self._record(attempt, outbox.put_back)
            return
        failpoint("webhooks.sent")
        self._metrics.webhooks.note(answered.failure or "delivered")
        await self._note(attempt, answered)
        failpoint("webhooks.recorded")

    async def _note(self, attempt: Attempt, answered: Answered) -> None:
        status, failure, retry_after = answered
        if failure is None:
            assert status is not None, "an answer"
            await self._record(attempt, partial(_note_delivered, status=status))
            return
        await until_answered(
            lambda: self._control_plane.change(
                attempt.delivery.tenant_id,
                BY_SYSTEM,
                lambda session: _note_failed(session, attempt, failure, status, retry_after),
            )
        )

    async def _record(self, attempt: Attempt, record: Record) -> None:
        await until_answered(
            lambda: self._control_plane.write(
                attempt.delivery.tenant_id, lambda session: record(session, attempt)
            )
        )


def choose(due: Sequence[Due], running: Collection[Due], room: int) -> list[Due]:
    """At most `room` of the due deliveries, within the limits of tenants and endpoints: always one
    of the tenant, and of it the endpoint, with the fewest running and chosen ones."""
    tenants = Counter(each.tenant_id for each in running)
    endpoints = Counter(each.endpoint_id for each in running)
    waiting, chosen = list(due), list[Due]()
    while len(chosen) < room:
        waiting = [
            each
            for each in waiting
            if tenants[each.tenant_id] < PER_TENANT and endpoints[each.endpoint_id] < PER_ENDPOINT
        ]
        if not waiting:
            break
        taken = min(
            waiting, key=lambda each: (tenants[each.tenant_id], endpoints[each.endpoint_id])
        )
        waiting.remove(taken)
        chosen.append(taken)
        tenants[taken.tenant_id] += 1
        endpoints[taken.endpoint_id] += 1
    return chosen


def _note_delivered(session: TenantSession, attempt: Attempt, *, status: int) -> None:
    outbox.note_delivered(session, attempt, status)


def _note_failed(
    session: TenantSession,
    attempt: Attempt,
    failure: Failure,
    status: int | None,
    retry_after: int | None,
) -> Changed[None]:
    wanted = None if retry_after is None else timedelta(seconds=retry_after)
    disabled_by = outbox.note_failed(session, attempt, failure, status, wanted)
    if disabled_by is None:
        return Changed(None, None)
    details = {"by": disabled_by, "failure": failure}
    return Changed(None, Event("webhook.disable", attempt.endpoint.id, details))
