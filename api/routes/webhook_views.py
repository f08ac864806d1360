"""Converts webhooks and their deliveries to API views."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ...platform.webhooks.event_types import DeliveryState
from ...platform.webhooks.models import WebhookDelivery, WebhookEndpoint
from ...platform.webhooks.service import IssuedSecret
from ..schemas.webhooks import DeliveryView, IssuedWebhookView, WebhookView


def webhook_view(endpoint: WebhookEndpoint) -> WebhookView:
    disabled_by: Any = endpoint.disabled_by
    return WebhookView(
        id=endpoint.id,
        url=endpoint.url,
        events=endpoint.events,
        description=endpoint.description,
        created_at=endpoint.created_at,
        created_by=endpoint.created_by,
        disabled_at=endpoint.disabled_at,
        disabled_by=disabled_by,
        failing_since=endpoint.failing_since,
        dropped_events=endpoint.num_dropped,
        previous_secret_until=endpoint.previous_until,
    )


def issued_webhook_view(issued: IssuedSecret) -> IssuedWebhookView:
    return IssuedWebhookView(**asdict(webhook_view(issued.endpoint)), secret=issued.text)


def delivery_view(delivery: WebhookDelivery) -> DeliveryView:
    is_pending = delivery.state is DeliveryState.PENDING
    return DeliveryView(
        id=delivery.id,
        event=delivery.event_id,
        type=delivery.type,
        state=delivery.state,
        attempts=delivery.num_attempts,
        created_at=delivery.created_at,
        next_attempt_at=delivery.due_at if is_pending else None,
        ended_at=delivery.ended_at,
        last_status=delivery.last_status,
        last_failure=delivery.last_failure,
    )
