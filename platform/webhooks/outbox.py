"""The outbox: events are added in the transaction of what they report, and sent until they arrive.

An event is sent at least once. A server takes due deliveries for a limited time, by moving the
moment at which they are due; if it stops, another server takes them when that moment has come. The
number of the attempt tells a late result from the present one.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Self

import msgspec
from sqlalchemy import delete, func, select, update

from ..base import new_id, utc_now
from ..errors import QuotaExceeded
from ..jobs.service import shared_now
from ..sessions import PlatformSession, TenantSession, UnitOfWork
from .event_types import DeliveryState, DisabledBy, EventType, Failure
from .models import WebhookDelivery, WebhookEndpoint

MAX_PENDING = 1000
"""Events of one endpoint that are still to be delivered; further ones are dropped and counted."""
MAX_ATTEMPTS = 25
MAX_AGE = timedelta(days=3)
"""Older events are not sent."""
DISABLED_AFTER = timedelta(days=2)
"""An endpoint is disabled by a failure this long after its first one without a success."""
KEPT_FOR = timedelta(days=30)
"""How long events are kept, delivered or not."""
CLAIM = timedelta(seconds=90)
"""How long an attempt may take before its server is taken for stopped."""
FIRST_PAUSE = timedelta(seconds=2)
MAX_PAUSE = timedelta(hours=6)
JITTER = 0.2
"""A pause is longer or shorter by up to this share of it."""
MAX_LISTED = 500
ROWS_AT_ONCE = 500
"""Rows that one transaction of the upkeep deletes."""


@dataclass(frozen=True, slots=True)
class Announced:
    """An event as every endpoint receives it."""

    id: str
    type: str
    """An `EventType`, or `TEST`."""
    body: bytes
    at: datetime

    @classmethod
    def now(cls, event_type: str, data: Mapping[str, Any]) -> Self:
        """An event that happens now. `data`: JSON values and moments."""
        event_id, now = f"evt_{uuid.uuid4().hex}", utc_now()
        content = {"id": event_id, "type": event_type, "timestamp": now, "data": data}
        return cls(event_id, event_type, msgspec.json.encode(content), now)


class Due(NamedTuple):
    """A delivery whose next attempt is due."""

    delivery_id: str
    endpoint_id: str
    tenant_id: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt at a delivery, by the server that has claimed it."""

    delivery: WebhookDelivery
    endpoint: WebhookEndpoint
    number: int


def announce(
    session: UnitOfWork, tenant_id: str, event_type: EventType, data: Mapping[str, Any]
) -> None:
    """Add an event for each of the tenant's endpoints that wants its type.

    It is sent once the unit of work is committed. `data` names things by id, name and digest; it
    never contains prompts, answers or secrets.
    """
    endpoints = session.scalars(
        select(WebhookEndpoint)
        .where(WebhookEndpoint.tenant_id == tenant_id, WebhookEndpoint.disabled_at.is_(None))
        .order_by(WebhookEndpoint.id)
        .with_for_update(read=True, key_share=True)  # none is deleted before the commit
    ).all()
    wanting = [each for each in endpoints if each.events is None or event_type in each.events]
    if not wanting:
        return
    event = Announced.now(event_type, data)
    for endpoint in wanting:
        try:
            add_delivery(session, endpoint, event)
        except QuotaExceeded:
            # Counted by the database: others announce to the endpoint at the same time.
            endpoint.num_dropped = WebhookEndpoint.num_dropped + 1
    session.flush()


def add_delivery(
    session: UnitOfWork, endpoint: WebhookEndpoint, event: Announced
) -> WebhookDelivery:
    """Deliver the event to the endpoint, which is locked. Raises QuotaExceeded."""
    num_pending = session.scalar(
        select(func.count(WebhookDelivery.id)).where(
            WebhookDelivery.endpoint_id == endpoint.id,
            WebhookDelivery.state == DeliveryState.PENDING,
        )
    )
    if num_pending is not None and num_pending >= MAX_PENDING:
        raise QuotaExceeded("pending events of a webhook", limit=MAX_PENDING, used=num_pending)
    delivery = WebhookDelivery(
        id=new_id(),
        tenant_id=endpoint.tenant_id,
        endpoint_id=endpoint.id,
        event_id=event.id,
        type=event.type,
        body=event.body,
        state=DeliveryState.PENDING,
        created_at=event.at,
        due_at=event.at,
        num_attempts=0,
    )
    session.add(delivery)
    session.flush()
    return delivery


# --- what the servers do --------------------------------------------------------------------------


def list_due(session: PlatformSession, per_endpoint: int) -> list[Due]:
    """The deliveries that are due, at most this many of an endpoint, first those of the endpoints
    with the fewest before them."""
    now = shared_now(session)
    earlier = func.row_number().over(
        partition_by=WebhookDelivery.endpoint_id,
        order_by=(WebhookDelivery.due_at, WebhookDelivery.id),
    )
    due = (
        select(
            WebhookDelivery.id,
            WebhookDelivery.endpoint_id,
            WebhookDelivery.tenant_id,
            WebhookDelivery.due_at,
            earlier.label("place"),
        )
        .join(WebhookEndpoint, WebhookEndpoint.id == WebhookDelivery.endpoint_id)
        .where(
            WebhookDelivery.state == DeliveryState.PENDING,
            WebhookDelivery.due_at <= now,
            WebhookDelivery.created_at > now - MAX_AGE,
            WebhookEndpoint.disabled_at.is_(None),
        )
        .subquery()
    )
    query = (
        select(due.c.id, due.c.endpoint_id, due.c.tenant_id)
        .where(due.c.place <= per_endpoint)
        .order_by(due.c.place, due.c.due_at)
        .limit(MAX_LISTED)
    )
    return [Due(*row) for row in session.execute(query)]


def claim(session: PlatformSession, delivery_ids: Collection[str], server_id: str) -> list[Attempt]:
    """Take those of the deliveries that are still due, for the time of CLAIM."""
    now = shared_now(session)
    deliveries = session.scalars(
        select(WebhookDelivery)
        .where(
            WebhookDelivery.id.in_(delivery_ids),
            WebhookDelivery.state == DeliveryState.PENDING,
            WebhookDelivery.due_at <= now,
        )
        .order_by(WebhookDelivery.due_at, WebhookDelivery.id)
        .with_for_update(skip_locked=True)
    ).all()
    for delivery in deliveries:
        delivery.server_id, delivery.due_at = server_id, now + CLAIM
        delivery.num_attempts += 1
    ids = {delivery.endpoint_id for delivery in deliveries}
    found = session.scalars(select(WebhookEndpoint).where(WebhookEndpoint.id.in_(ids)))
    endpoints = {endpoint.id: endpoint for endpoint in found}
    return [
        Attempt(delivery, endpoints[delivery.endpoint_id], delivery.num_attempts)
        for delivery in deliveries
    ]


def recover(session: PlatformSession, server_id: str) -> None:
    """Make due what this server was sending when it stopped."""
    session.execute(
        update(WebhookDelivery)
        .where(
            WebhookDelivery.state == DeliveryState.PENDING, WebhookDelivery.server_id == server_id
        )
        .values(server_id=None, due_at=utc_now())
    )


def note_delivered(session: TenantSession, attempt: Attempt, status: int) -> None:
    """The endpoint has answered with success."""
    found = _lock(session, attempt)
    if found is None:
        return
    delivery, endpoint = found
    delivery.state, delivery.ended_at = DeliveryState.DELIVERED, utc_now()
    delivery.last_status, delivery.last_failure, delivery.server_id = status, None, None
    endpoint.failing_since = None


def note_failed(
    session: TenantSession,
    attempt: Attempt,
    failure: Failure,
    status: int | None,
    retry_after: timedelta | None = None,
) -> DisabledBy | None:
    """The attempt has failed: a later one is made, unless it was the last. `retry_after`: when the
    endpoint wants it.

    Returns why the endpoint is disabled now; None if it is not.
    """
    found = _lock(session, attempt)
    if found is None:
        return None
    delivery, endpoint = found
    now = utc_now()
    delivery.last_status, delivery.last_failure, delivery.server_id = status, failure, None
    delivery.due_at = now + pause_after(delivery.num_attempts, retry_after)
    is_last = delivery.num_attempts >= MAX_ATTEMPTS
    if is_last or failure is Failure.GONE or delivery.due_at > delivery.created_at + MAX_AGE:
        delivery.state, delivery.ended_at = DeliveryState.FAILED, now
    endpoint.failing_since = endpoint.failing_since or now
    if endpoint.disabled_at is not None:
        return None
    if failure is Failure.GONE:
        endpoint.disabled_at, endpoint.disabled_by = now, DisabledBy.RECEIVER
        return DisabledBy.RECEIVER
    if now - endpoint.failing_since >= DISABLED_AFTER:
        endpoint.disabled_at, endpoint.disabled_by = now, DisabledBy.FAILURES
        return DisabledBy.FAILURES
    return None


def put_back(session: TenantSession, attempt: Attempt) -> None:
    """The attempt was broken off by this server's own failure: the endpoint is not blamed."""
    found = _lock(session, attempt)
    if found is not None:
        delivery, _ = found
        delivery.server_id, delivery.due_at = None, utc_now() + pause_after(delivery.num_attempts)


def pause_after(num_attempts: int, wanted: timedelta | None = None) -> timedelta:
    """The time until the next attempt: doubled each time, with jitter. What the endpoint wants can
    make it longer, up to the longest pause, and never shorter."""
    pause: timedelta = min(FIRST_PAUSE * 2 ** min(num_attempts - 1, 32), MAX_PAUSE)
    if wanted is not None and wanted > pause:
        return min(wanted, MAX_PAUSE) * random.uniform(1, 1 + JITTER)
    return pause * random.uniform(1 - JITTER, 1 + JITTER)


def purge(session: PlatformSession) -> int:
    """Give up what is too old to be sent, and delete what was kept long enough; returns the number
    of deleted rows."""
    now = shared_now(session)
    session.execute(
        update(WebhookDelivery)
        .where(
            WebhookDelivery.state == DeliveryState.PENDING,
            WebhookDelivery.created_at <= now - MAX_AGE,
            WebhookDelivery.due_at <= now,
        )
        .values(state=DeliveryState.FAILED, ended_at=now, server_id=None)
    )
    old = select(WebhookDelivery.id).where(WebhookDelivery.created_at < now - KEPT_FOR)
    removed: Sequence[Any] = session.execute(
        delete(WebhookDelivery)
        .where(WebhookDelivery.id.in_(old.limit(ROWS_AT_ONCE)))
        .returning(WebhookDelivery.id)
    ).all()
    return len(removed)


def _lock(
    session: TenantSession, attempt: Attempt
) -> tuple[WebhookDelivery, WebhookEndpoint] | None:
    """The delivery and its endpoint; None if one is deleted, or if this is not the present attempt.

    The endpoint is locked first, as it is when it is deleted.
    """
    endpoint = session.scalars(
        select(WebhookEndpoint)
        .where(WebhookEndpoint.id == attempt.endpoint.id)
        .with_for_update(key_share=True)
    ).one_or_none()
    delivery = session.scalars(
        select(WebhookDelivery).where(WebhookDelivery.id == attempt.delivery.id).with_for_update()
    ).one_or_none()
    if endpoint is None or delivery is None:
        return None
    is_present = (
        delivery.state is DeliveryState.PENDING
        and delivery.num_attempts == attempt.number
        and delivery.server_id == attempt.delivery.server_id
    )
    return (delivery, endpoint) if is_present else None
