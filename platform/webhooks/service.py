"""What callers do with webhooks: create, list, change, rotate, test and delete them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sqlalchemy import bindparam, delete, func, select, tuple_

from ..base import utc_now
from ..errors import InvalidTransition, QuotaExceeded, WebhookNotFound
from ..quotas.repository import lock_tenant
from ..sessions import PlatformSession, TenantSession
from .event_types import TEST, DeliveryState, DisabledBy, EventType
from .models import WebhookDelivery, WebhookEndpoint
from .outbox import Announced, add_delivery
from .signing import SigningSecrets

MAX_WEBHOOKS = 10
"""Of one tenant."""


@dataclass(frozen=True, slots=True)
class IssuedSecret:
    """A webhook with its new secret, which can be read here and never again."""

    endpoint: WebhookEndpoint
    text: str = field(repr=False)


class WebhookService:
    """Webhooks whose secrets are encrypted under the server's."""

    def __init__(self, secrets: SigningSecrets, *, clock: Callable[[], datetime] = utc_now) -> None:
        self.secrets = secrets
        self._clock = clock

    def create(
        self,
        session: TenantSession,
        *,
        url: str,
        events: Iterable[EventType] | None,
        description: str | None,
        created_by: str,
    ) -> IssuedSecret:
        """Add a webhook for these events; None: for all. `url` was checked.

        Raises QuotaExceeded.
        """
        lock_tenant(session)
        used = session.scalar(select(func.count(WebhookEndpoint.id))) or 0
        if used >= MAX_WEBHOOKS:
            raise QuotaExceeded("webhooks", limit=MAX_WEBHOOKS, used=used)
        endpoint = WebhookEndpoint(
            id=f"whk_{uuid.uuid4().hex}",
            url=url,
            description=description,
            events=_sorted(events),
            created_at=self._clock(),
            created_by=created_by,
            num_dropped=0,
        )
        issued = IssuedSecret(endpoint, self.secrets.renew(endpoint, None))
        session.add(endpoint)
        session.flush()
        return issued

    def rotate(self, session: TenantSession, webhook_id: str, overlap: timedelta) -> IssuedSecret:
        """Give the webhook a new secret; the old one also signs for the time of `overlap`.

        Raises WebhookNotFound.
        """
        endpoint = get_webhook_to_change(session, webhook_id)
        until = self._clock() + overlap if overlap else None
        return IssuedSecret(endpoint, self.secrets.renew(endpoint, until))

    def reseal(self, session: PlatformSession) -> int:
        """Encrypt all secrets under the server's present secret, and forget previous ones that no
        longer sign; returns how many rows changed."""
        now = self._clock()
        is_over = WebhookEndpoint.previous_until <= now
        is_old = WebhookEndpoint.secret_id != self.secrets.current_id
        rows = session.scalars(
            select(WebhookEndpoint)
            .where(is_over | is_old)
            .order_by(WebhookEndpoint.id)
            .with_for_update(key_share=True)
        ).all()
        for endpoint in rows:
            if endpoint.previous_until is not None and endpoint.previous_until <= now:
                endpoint.previous_secret = endpoint.previous_until = None
            self.secrets.reseal(endpoint)
        return len(rows)


def get_webhook(session: TenantSession, webhook_id: str) -> WebhookEndpoint:
    """The tenant's webhook. Raises WebhookNotFound."""
    query = select(WebhookEndpoint).where(WebhookEndpoint.id == webhook_id)
    return _found(session.scalars(query).one_or_none())


def get_webhook_to_change(session: TenantSession, webhook_id: str) -> WebhookEndpoint:
    """The same, locked until this unit of work ends; events can be added meanwhile."""
    query = select(WebhookEndpoint).where(WebhookEndpoint.id == webhook_id)
    return _found(session.scalars(query.with_for_update(key_share=True)).one_or_none())


def list_webhooks(
    session: TenantSession, *, after: str | None, limit: int
) -> Sequence[WebhookEndpoint]:
    """At most `limit` webhooks after the webhook `after`, the oldest first."""
    query = select(WebhookEndpoint).order_by(WebhookEndpoint.created_at, WebhookEndpoint.id)
    if after is not None:
        last = select(WebhookEndpoint.created_at, WebhookEndpoint.id)
        last = last.where(WebhookEndpoint.id == after)
        place = tuple_(WebhookEndpoint.created_at, WebhookEndpoint.id)
        query = query.where(place > last.scalar_subquery())
    return session.scalars(query.limit(limit)).all()


def set_events(endpoint: WebhookEndpoint, events: Iterable[EventType] | None) -> None:
    """Send these types from now on; None: all."""
    endpoint.events = _sorted(events)


def disable(endpoint: WebhookEndpoint, by: DisabledBy, now: datetime) -> None:
    """Send no more events. Pending ones stay until they are too old."""
    endpoint.disabled_at, endpoint.disabled_by = now, by


def enable(endpoint: WebhookEndpoint) -> None:
    """Send events again."""
    endpoint.disabled_at = endpoint.disabled_by = endpoint.failing_since = None


def remove(session: TenantSession, webhook_id: str) -> WebhookEndpoint:
    """Delete the webhook, its secrets and its events. Raises WebhookNotFound."""
    query = select(WebhookEndpoint).where(WebhookEndpoint.id == webhook_id)
    endpoint = _found(session.scalars(query.with_for_update()).one_or_none())
    session.execute_pinned(_REMOVE_DELIVERIES, {"endpoint_id": webhook_id})
    session.delete(endpoint)
    session.flush()
    return endpoint


def send_test(session: TenantSession, webhook_id: str) -> WebhookDelivery:
    """Add a `webhook.test` event for this webhook, whatever it subscribes to.

    Raises WebhookNotFound, InvalidTransition if it is disabled, or QuotaExceeded if too many of its
    events are pending.
    """
    endpoint = get_webhook_to_change(session, webhook_id)
    if endpoint.disabled_at is not None:
        raise InvalidTransition("disabled", "tested")
    event = Announced.now(TEST, {"webhook": webhook_id})
    return add_delivery(session, endpoint, event)


def list_deliveries(
    session: TenantSession,
    webhook_id: str,
    *,
    state: DeliveryState | None,
    after: str | None,
    limit: int,
) -> Sequence[WebhookDelivery]:
    """At most `limit` deliveries after the delivery `after`, the newest first.

    Raises WebhookNotFound.
    """
    get_webhook(session, webhook_id)
    place = tuple_(WebhookDelivery.created_at, WebhookDelivery.id)
    query = select(WebhookDelivery).where(WebhookDelivery.endpoint_id == webhook_id)
    if state is not None:
        query = query.where(WebhookDelivery.state == state)
    if after is not None:
        last = select(WebhookDelivery.created_at, WebhookDelivery.id)
        query = query.where(place < last.where(WebhookDelivery.id == after).scalar_subquery())
    order = (WebhookDelivery.created_at.desc(), WebhookDelivery.id.desc())
    return session.scalars(query.order_by(*order).limit(limit)).all()


_DELIVERIES = WebhookDelivery.__table__
_REMOVE_DELIVERIES = delete(_DELIVERIES).where(  # type: ignore[arg-type]
    _DELIVERIES.c.tenant_id == bindparam("tenant_id"),
    _DELIVERIES.c.endpoint_id == bindparam("endpoint_id"),
)


def _found(endpoint: WebhookEndpoint | None) -> WebhookEndpoint:
    if endpoint is None:
        raise WebhookNotFound
    return endpoint


def _sorted(events: Iterable[EventType] | None) -> list[str] | None:
    return None if events is None else sorted(set(events))
