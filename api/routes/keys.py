"""`/v1/keys`: the tenant's API keys. Callers cannot grant more than they have."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from ...platform.audit.event import Changed, Event
from ...platform.base import JsonObject, utc_now
from ...platform.keys.models import ApiKey
from ...platform.keys.principal import Principal, Scope
from ...platform.sessions import TenantSession
from ..contract.promises import answers
from ..http.auth import Confirmed, origin_of, require
from ..http.bodies import json_body
from ..http.etags import TAGGED, IfMatch, tagged_response
from ..http.json_response import json_response
from ..schemas.adapters import PageView
from ..schemas.identity import IssuedKeyView, KeyBody, KeyView, RotateBody
from ..server.runtime import CurrentRuntime
from .identity_views import issued_key_view, key_view
from .pages import Page

router = APIRouter(prefix="/v1/keys")

Manager = Annotated[Principal, Depends(require(Scope.KEYS_MANAGE))]


@router.get("")
@answers(PageView[KeyView])
async def list_keys(
    runtime: CurrentRuntime,
    principal: Manager,
    page: Page,
    user: Annotated[str | None, Query(max_length=64)] = None,
    active: Annotated[bool, Query()] = False,
) -> Response:
    """The tenant's keys, oldest first.

    `active=true` excludes revoked and expired keys; `user` selects the keys of one user.
    """
    keys = runtime.control_plane.keys
    rows = await runtime.control_plane.read(
        principal.tenant_id,
        lambda session: keys.list_keys(
            session,
            after=page.after,
            limit=page.num_rows,
            user_id=user,
            is_active=active,
            viewer=principal,
        ),
    )
    return json_response(page.answer(rows, view=key_view, cursor=lambda key: key.id))


@router.post("")
@answers(IssuedKeyView, 201, errors=("user_not_found", "grant_too_wide", "quota_exceeded"))
async def create_key(
    request: Request,
    runtime: CurrentRuntime,
    principal: Manager,
    confirmed: Confirmed,
    body: Annotated[KeyBody, Depends(json_body(KeyBody))],
) -> Response:
    """Create a key.

    The response contains the key; it is not shown again.
    """
    keys = runtime.control_plane.keys
    days = body.expires_in_days

    def issue(session: TenantSession) -> Changed[IssuedKeyView]:
        issued = keys.issue(
            session,
            name=body.name,
            scopes=body.scopes,
            adapters=body.adapters,
            networks=body.networks,
            user_id=body.user,
            expires_at=None if days is None else utc_now() + timedelta(days=days),
            issuer=principal,
        )
        event = Event("key.create", issued.key.id, _details(issued.key))
        return Changed(issued_key_view(issued), event)

    view = await runtime.control_plane.change(
        principal.tenant_id, origin_of(request, principal), issue
    )
    return json_response(view, status_code=201)


@router.get("/{key_id}")
@answers(KeyView, errors=("key_not_found",), headers=TAGGED)
async def get_key(runtime: CurrentRuntime, principal: Manager, key_id: str) -> Response:
    """One key: its permissions and its last use."""
    keys = runtime.control_plane.keys
    key = await runtime.control_plane.read(
        principal.tenant_id, lambda session: keys.get(session, key_id, viewer=principal)
    )
    return tagged_response(key_view(key))


@router.post("/{key_id}/rotate")
@answers(
    IssuedKeyView,
    201,
    errors=("key_not_found", "grant_too_wide", "quota_exceeded", "state_conflict"),
)
async def rotate_key(
    request: Request,
    runtime: CurrentRuntime,
    principal: Manager,
    confirmed: Confirmed,
    key_id: str,
    if_match: IfMatch,
    body: Annotated[RotateBody, Depends(json_body(RotateBody))],
) -> Response:
    """Rotate the key.

    The new key has the same permissions and expiry; the old one expires after the overlap. The
    response contains the new key; it is not shown again.
    """
    keys = runtime.control_plane.keys

    def rotate(session: TenantSession) -> Changed[IssuedKeyView]:
        if_match.check(key_view(keys.get_to_change(session, key_id, viewer=principal)))
        overlap = timedelta(seconds=body.overlap_seconds)
        issued = keys.rotate(session, key_id, overlap=overlap, issuer=principal)
        details = {"successor": issued.key.id, "overlap_seconds": body.overlap_seconds}
        return Changed(issued_key_view(issued), Event("key.rotate", key_id, details))

    view = await runtime.control_plane.change(
        principal.tenant_id, origin_of(request, principal), rotate
    )
    return json_response(view, status_code=201)


@router.delete("/{key_id}")
@answers(KeyView, errors=("key_not_found",), headers=TAGGED)
async def revoke_key(
    request: Request,
    runtime: CurrentRuntime,
    principal: Manager,
    key_id: str,
    if_match: IfMatch,
) -> Response:
    """Revoke the key.

    Every server refuses it within five seconds. Returns the key; the request can be repeated.
    """
    keys = runtime.control_plane.keys

    def revoke(session: TenantSession) -> Changed[KeyView]:
        before = keys.get_to_change(session, key_id, viewer=principal)
        if_match.check(key_view(before))
        was_revoked = before.revoked_at is not None
        key = keys.revoke(session, key_id, viewer=principal)
        event = None if was_revoked else Event("key.revoke", key.id, {"name": key.name})
        return Changed(key_view(key), event)

    view = await runtime.control_plane.change(
        principal.tenant_id, origin_of(request, principal), revoke
    )
    return tagged_response(view)


def _details(key: ApiKey) -> JsonObject:
    return {
        "name": key.name,
        "scopes": key.scopes,
        "adapters": key.adapters,
        "networks": key.networks,
        "user": key.user_id,
        "expires_at": None if key.expires_at is None else key.expires_at.isoformat(),
    }
