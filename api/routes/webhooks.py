"""`/v1/webhooks`: where the tenant's events are sent."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from ...platform.audit.event import Changed, Event
from ...platform.base import JsonObject, utc_now
from ...platform.keys.principal import Principal, Scope
from ...platform.sessions import TenantSession
from ...platform.webhooks import service
from ...platform.webhooks.event_types import DeliveryState, DisabledBy
from ...platform.webhooks.models import WebhookEndpoint
from ..contract.promises import answers
from ..http.auth import Confirmed, require
from ..http.bodies import json_body
from ..http.etags import TAGGED, IfMatch, tagged_response
from ..http.json_response import json_response
from ..schemas.adapters import PageView
from ..schemas.identity import RotateBody
from ..schemas.webhooks import (
    DeliveryView,
    IssuedWebhookView,
    WebhookBody,
    WebhookChange,
    WebhookView,
)
from ..server.runtime import CurrentRuntime
from .pages import Page
from .parameters import RequestOrigin
from .webhook_views import delivery_view, issued_webhook_view, webhook_view

router = APIRouter(prefix="/v1/webhooks")

Reader = Annotated[Principal, Depends(require(Scope.WEBHOOKS_READ))]
Writer = Annotated[Principal, Depends(require(Scope.WEBHOOKS_WRITE))]
_URL_ERRORS = ("webhook_url_invalid", "webhook_host_not_allowed")


@router.get("")
@answers(PageView[WebhookView])
async def list_webhooks(runtime: CurrentRuntime, principal: Reader, page: Page) -> Response:
    """List the tenant's webhooks, the oldest first."""
    rows = await runtime.control_plane.read(
        principal.tenant_id,
        lambda session: service.list_webhooks(session, after=page.after, limit=page.num_rows),
    )
    return json_response(page.answer(rows, view=webhook_view, cursor=lambda row: row.id))


@router.post("")
@answers(IssuedWebhookView, 201, errors=(*_URL_ERRORS, "quota_exceeded"))
async def create_webhook(
    runtime: CurrentRuntime,
    principal: Writer,
    origin: RequestOrigin,
    confirmed: Confirmed,
    body: Annotated[WebhookBody, Depends(json_body(WebhookBody))],
) -> Response:
    """Create a webhook.

    The response contains the secret that signs its events; it is not shown again.
    """
    target = runtime.settings.webhook_policy.check(body.url)
    webhooks = runtime.control_plane.webhooks

    def create(session: TenantSession) -> Changed[IssuedWebhookView]:
        issued = webhooks.create(
            session,
            url=target.url,
            events=body.events,
            description=body.description,
            created_by=str(origin.actor),
        )
        event = Event("webhook.create", issued.endpoint.id, _details(issued.endpoint))
        return Changed(issued_webhook_view(issued), event)

    view = await runtime.control_plane.change(principal.tenant_id, origin, create)
    return json_response(view, status_code=201)


@router.get("/{webhook_id}")
@answers(WebhookView, errors=("webhook_not_found",), headers=TAGGED)
async def get_webhook(runtime: CurrentRuntime, principal: Reader, webhook_id: str) -> Response:
    """One webhook: its URL, its events, and whether it fails."""
    found = await runtime.control_plane.read(
        principal.tenant_id, lambda session: service.get_webhook(session, webhook_id)
    )
    return tagged_response(webhook_view(found))


@router.patch("/{webhook_id}")
@answers(WebhookView, errors=("webhook_not_found", *_URL_ERRORS), headers=TAGGED)
async def change_webhook(
    runtime: CurrentRuntime,
    principal: Writer,
    origin: RequestOrigin,
    webhook_id: str,
    if_match: IfMatch,
    body: Annotated[WebhookChange, Depends(json_body(WebhookChange))],
) -> Response:
    """Change a webhook's URL, events or description; disable or enable it.

    Pending events are sent to the new URL.
    """
    sent = body.model_fields_set
    url = runtime.settings.webhook_policy.check(body.url).url if "url" in sent else None

    def change(session: TenantSession) -> Changed[WebhookView]:
        endpoint = service.get_webhook_to_change(session, webhook_id)
        before = webhook_view(endpoint)
        if_match.check(before)
        _apply(endpoint, body, url)
        session.flush()
        after = webhook_view(endpoint)
        event = Event("webhook.change", webhook_id, _details(endpoint))
        return Changed(after, event if after != before else None)

    view = await runtime.control_plane.change(principal.tenant_id, origin, change)
    return tagged_response(view)


@router.delete("/{webhook_id}")
@answers(None, 204, errors=("webhook_not_found",))
async def delete_webhook(
    runtime: CurrentRuntime,
    principal: Writer,
    origin: RequestOrigin,
    webhook_id: str,
    if_match: IfMatch,
) -> Response:
    """Delete a webhook, its secrets and all its events, also those that are not delivered yet."""

    def remove(session: TenantSession) -> Changed[None]:
        if_match.check(webhook_view(service.get_webhook_to_change(session, webhook_id)))
        service.remove(session, webhook_id)
        return Changed(None, Event("webhook.delete", webhook_id))

    await runtime.control_plane.change(principal.tenant_id, origin, remove)
    return Response(status_code=204)


@router.post("/{webhook_id}/rotate")
@answers(IssuedWebhookView, errors=("webhook_not_found",))
async def rotate_webhook_secret(
    runtime: CurrentRuntime,
    principal: Writer,
    origin: RequestOrigin,
    confirmed: Confirmed,
    webhook_id: str,
    if_match: IfMatch,
    body: Annotated[RotateBody, Depends(json_body(RotateBody))],
) -> Response:
    """Give the webhook a new secret.

    Events are signed with both secrets until the overlap ends. The response contains the new
    secret; it is not shown again.
    """
    webhooks = runtime.control_plane.webhooks

    def rotate(session: TenantSession) -> Changed[IssuedWebhookView]:
        if_match.check(webhook_view(service.get_webhook_to_change(session, webhook_id)))
        overlap = timedelta(seconds=body.overlap_seconds)
        issued = webhooks.rotate(session, webhook_id, overlap)
        details: JsonObject = {"overlap_seconds": body.overlap_seconds}
        return Changed(issued_webhook_view(issued), Event("webhook.rotate", webhook_id, details))

    view = await runtime.control_plane.change(principal.tenant_id, origin, rotate)
    return json_response(view)


@router.post("/{webhook_id}/test")
@answers(DeliveryView, 202, errors=("webhook_not_found", "state_conflict", "quota_exceeded"))
async def test_webhook(
    runtime: CurrentRuntime, principal: Writer, origin: RequestOrigin, webhook_id: str
) -> Response:
    """Send an event of the type `webhook.test`, whatever the webhook subscribes to.

    The webhook's deliveries show what came of it.
    """

    def send(session: TenantSession) -> Changed[DeliveryView]:
        delivery = service.send_test(session, webhook_id)
        return Changed(delivery_view(delivery), Event("webhook.test", webhook_id))

    view = await runtime.control_plane.change(principal.tenant_id, origin, send)
    return json_response(view, status_code=202)


@router.get("/{webhook_id}/deliveries")
@answers(PageView[DeliveryView], errors=("webhook_not_found",))
async def list_deliveries(
    runtime: CurrentRuntime,
    principal: Reader,
    webhook_id: str,
    page: Page,
    state: Annotated[DeliveryState | None, Query()] = None,
) -> Response:
    """List the webhook's events of the last 30 days, the newest first."""
    rows = await runtime.control_plane.read(
        principal.tenant_id,
        lambda session: service.list_deliveries(
            session, webhook_id, state=state, after=page.after, limit=page.num_rows
        ),
    )
    return json_response(page.answer(rows, view=delivery_view, cursor=lambda row: row.id))


def _apply(endpoint: WebhookEndpoint, body: WebhookChange, url: str | None) -> None:
    sent = body.model_fields_set
    if url is not None:
        endpoint.url = url
    if "events" in sent:
        service.set_events(endpoint, body.events)
    if "description" in sent:
        endpoint.description = body.description
    if "disabled" not in sent:
        return
    if not body.disabled:
        service.enable(endpoint)
    elif endpoint.disabled_at is None:
        service.disable(endpoint, DisabledBy.CALLER, utc_now())


def _details(endpoint: WebhookEndpoint) -> JsonObject:
    """Without the URL's path and query, which may contain a token of the receiver."""
    host = endpoint.url.removeprefix("https://").partition("/")[0]
    disabled = endpoint.disabled_at is not None
    return {"host": host, "events": endpoint.events, "disabled": disabled}
