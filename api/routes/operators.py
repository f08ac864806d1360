"""`/admin/operators`: operators and their keys. The first is created on the server's machine."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...platform.accounts.service import AccountService, IssuedInvitation
from ...platform.audit.event import Changed, Event
from ...platform.errors import OwnAccount
from ...platform.identities import service as identities
from ...platform.keys.principal import OperatorPrincipal, OperatorRole
from ...platform.operators.models import Operator
from ...platform.operators.service import OperatorService
from ...platform.sessions import PlatformSession
from ..contract.errors import ApiError
from ..contract.promises import answers
from ..http.auth import Confirmation, Confirmed, origin_of, read_confirmation, require_operator
from ..http.bodies import json_body
from ..http.browser import base_url, transport_of
from ..http.etags import TAGGED, IfMatch, tagged_response
from ..http.json_response import json_response
from ..schemas.adapters import ListView, PageView
from ..schemas.identity import (
    IdentityBody,
    IdentityView,
    IssuedOperatorKeyView,
    OperatorBody,
    OperatorChange,
    OperatorKeyBody,
    OperatorKeyView,
    OperatorView,
)
from ..schemas.sessions import InvitationView
from ..server.runtime import CurrentRuntime
from .identity_views import (
    identity_view,
    invitation_view,
    issued_operator_key_view,
    operator_key_view,
    operator_view,
)
from .pages import Page

router = APIRouter(prefix="/admin/operators")

Reader = Annotated[
    OperatorPrincipal, Depends(require_operator(OperatorRole.ADMIN, OperatorRole.VIEWER))
]
Writer = Annotated[OperatorPrincipal, Depends(require_operator(OperatorRole.ADMIN))]


@router.get("")
@answers(PageView[OperatorView])
async def list_operators(runtime: CurrentRuntime, operator: Reader, page: Page) -> Response:
    """List operators by name."""
    service = runtime.control_plane.operators
    rows = await runtime.control_plane.read_all_tenants(
        lambda session: service.list_operators(session, after=page.after, limit=page.num_rows)
    )
    return json_response(page.answer(rows, view=operator_view, cursor=lambda row: row.name))


@router.post("")
@answers(OperatorView, 201, errors=("operator_exists",), headers=TAGGED)
async def create_operator(
    request: Request,
    runtime: CurrentRuntime,
    operator: Writer,
    body: Annotated[OperatorBody, Depends(json_body(OperatorBody))],
) -> Response:
    """Create an operator.

    It has no key yet.
    """
    service = runtime.control_plane.operators

    def create(session: PlatformSession) -> Changed[OperatorView]:
        made = service.create(session, body.name, body.role)
        event = Event("operator.create", made.name, {"role": made.role})
        return Changed(operator_view(made), event)

    view = await runtime.control_plane.change_platform(origin_of(request, operator), create)
    return tagged_response(view, status_code=201)


@router.get("/{name}")
@answers(OperatorView, errors=("operator_not_found",), headers=TAGGED)
async def get_operator(runtime: CurrentRuntime, operator: Reader, name: str) -> Response:
    """One operator."""
    service = runtime.control_plane.operators
    found = await runtime.control_plane.read_all_tenants(lambda session: service.get(session, name))
    return tagged_response(operator_view(found))


@router.patch("/{name}")
@answers(
    OperatorView,
    errors=("operator_not_found", "own_account", "last_administrator"),
    headers=TAGGED,
)
async def change_operator(
    request: Request,
    runtime: CurrentRuntime,
    operator: Writer,
    name: str,
    if_match: IfMatch,
    confirmation: Annotated[Confirmation, Depends(read_confirmation)],
    body: Annotated[OperatorChange, Depends(json_body(OperatorChange))],
) -> Response:
    """Change an operator's role, disable or enable it.

    Disabling revokes the operator's keys permanently and ends its password and sessions. You cannot
    change yourself or the last active administrator. In a session, a change of role requires a
    recent password confirmation.
    """
    if "role" in body.model_fields_set:
        confirmation.check()
    service, accounts = runtime.control_plane.operators, runtime.control_plane.accounts

    def change(session: PlatformSession) -> Changed[OperatorView]:
        before = operator_view(service.get_to_change(session, name))
        if_match.check(before)
        _apply(service, accounts, session, name, body, operator)
        return _changed(before, service.get(session, name))

    view = await runtime.control_plane.change_platform(origin_of(request, operator), change)
    return tagged_response(view)


@router.get("/{name}/keys")
@answers(ListView[OperatorKeyView], errors=("operator_not_found",))
async def list_operator_keys(runtime: CurrentRuntime, operator: Reader, name: str) -> Response:
    """The operator's keys, oldest first, including revoked ones."""
    service = runtime.control_plane.operators
    keys = await runtime.control_plane.read_all_tenants(
        lambda session: service.list_keys(session, name)
    )
    return json_response(ListView([operator_key_view(key) for key in keys]))


@router.post("/{name}/invitation")
@answers(InvitationView, 201, errors=("operator_not_found", "state_conflict"))
async def invite_operator(
    request: Request, runtime: CurrentRuntime, operator: Writer, confirmed: Confirmed, name: str
) -> Response:
    """Create an invitation to set a console password; valid once and for a day.

    An earlier invitation becomes invalid. The current password stays valid until this invitation is
    used.
    """
    plane = runtime.control_plane

    def invite(session: PlatformSession) -> Changed[IssuedInvitation]:
        operator = plane.operators.get_to_change(session, name)
        issued = plane.accounts.invite_operator(session, operator)
        return Changed(issued, Event("operator.invite", name))

    issued = await plane.change_platform(origin_of(request, operator), invite)
    transport = transport_of(request, runtime.settings.trusted_proxies)
    return json_response(invitation_view(issued, base_url(request, transport)), status_code=201)


@router.post("/{name}/keys")
@answers(
    IssuedOperatorKeyView, 201, errors=("operator_not_found", "state_conflict", "grant_too_wide")
)
async def create_operator_key(
    request: Request,
    runtime: CurrentRuntime,
    operator: Writer,
    confirmed: Confirmed,
    name: str,
    body: Annotated[OperatorKeyBody, Depends(json_body(OperatorKeyBody))],
) -> Response:
    """Create a key for the operator.

    The response contains the key; it is not shown again.
    """
    service = runtime.control_plane.operators
    days = body.expires_in_days
    lifetime = None if days is None else timedelta(days=days)

    def issue(session: PlatformSession) -> Changed[IssuedOperatorKeyView]:
        holder = service.get(session, name)
        issued = service.issue_key(
            session,
            holder,
            name=body.name,
            lifetime=lifetime,
            networks=body.networks,
            issuer=operator,
        )
        key = issued.key
        details = {
            "key": key.id,
            "name": key.name,
            "expires_in_days": days,
            "networks": key.networks,
        }
        event = Event("operator.key.create", holder.name, details)
        return Changed(issued_operator_key_view(issued), event)

    view = await runtime.control_plane.change_platform(origin_of(request, operator), issue)
    return json_response(view, status_code=201)


@router.delete("/{name}/keys/{key_id}")
@answers(OperatorKeyView, errors=("operator_not_found", "key_not_found"))
async def revoke_operator_key(
    request: Request, runtime: CurrentRuntime, operator: Writer, name: str, key_id: str
) -> Response:
    """Revoke a key of the operator.

    Returns the key; the request can be repeated.
    """
    service = runtime.control_plane.operators

    def revoke(session: PlatformSession) -> Changed[OperatorKeyView]:
        key = service.revoke_key(session, name, key_id)
        event = Event("operator.key.revoke", name, {"key": key.id})
        return Changed(operator_key_view(key), event)

    view = await runtime.control_plane.change_platform(origin_of(request, operator), revoke)
    return json_response(view)


@router.get("/{name}/identity")
@answers(IdentityView, errors=("operator_not_found", "identity_not_found"))
async def get_operator_identity(runtime: CurrentRuntime, operator: Reader, name: str) -> Response:
    """The person at the identity provider who signs in as this operator."""
    service = runtime.control_plane.operators

    def read(session: PlatformSession) -> IdentityView:
        return identity_view(identities.get_identity(session, service.get(session, name).id))

    return json_response(await runtime.control_plane.read_all_tenants(read))


@router.put("/{name}/identity")
@answers(
    IdentityView,
    errors=(
        *("operator_not_found", "own_account", "identity_conflict"),
        "identity_provider_missing",
    ),
)
async def link_operator(
    request: Request,
    runtime: CurrentRuntime,
    operator: Writer,
    confirmed: Confirmed,
    name: str,
    body: Annotated[IdentityBody, Depends(json_body(IdentityBody))],
) -> Response:
    """Let a person of the identity provider sign in as another operator, instead of an earlier one.

    This ends the operator's sessions. At the next sign-in the person's groups set the role.
    """
    plane = runtime.control_plane

    def link(session: PlatformSession) -> Changed[IdentityView]:
        linked = _get_other(plane.operators, session, name, operator)
        issuer = runtime.settings.oidc_issuer
        if issuer is None:
            raise ApiError("identity_provider_missing")
        is_changed = identities.link(session, linked, issuer, body.subject)
        if is_changed:
            plane.accounts.end_all(session, linked.id)
        view = identity_view(identities.get_identity(session, linked.id))
        event = Event("operator.link", name, {"issuer": issuer, "subject": body.subject})
        return Changed(view, event if is_changed else None)

    view = await plane.change_platform(origin_of(request, operator), link)
    return json_response(view)


@router.delete("/{name}/identity")
@answers(errors=("operator_not_found", "own_account", "identity_not_found"))
async def unlink_operator(
    request: Request, runtime: CurrentRuntime, operator: Writer, confirmed: Confirmed, name: str
) -> Response:
    """Take the identity of another operator away, which ends the operator's sessions."""
    plane = runtime.control_plane

    def unlink(session: PlatformSession) -> Changed[None]:
        linked = _get_other(plane.operators, session, name, operator)
        identities.unlink(session, linked.id)
        plane.accounts.end_all(session, linked.id)
        return Changed(None, Event("operator.unlink", name))

    await plane.change_platform(origin_of(request, operator), unlink)
    return Response(status_code=204)


def _get_other(
    service: OperatorService, session: PlatformSession, name: str, caller: OperatorPrincipal
) -> Operator:
    """The operator to change. Raises OperatorNotFound, or OwnAccount if it is the caller."""
    found = service.get_to_change(session, name)
    if found.id == caller.actor.id:
        raise OwnAccount
    return found


def _apply(
    service: OperatorService,
    accounts: AccountService,
    session: PlatformSession,
    name: str,
    body: OperatorChange,
    by: OperatorPrincipal,
) -> None:
    sent = body.model_fields_set
    if "role" in sent:
        service.change_role(session, name, body.role, by=by.actor)
    if "disabled" in sent and body.disabled:
        accounts.close(session, service.disable(session, name, by=by.actor).id)
    elif "disabled" in sent:
        service.enable(session, name)


def _changed(before: OperatorView, operator: Operator) -> Changed[OperatorView]:
    after = operator_view(operator)
    details: dict[str, Any] = {}
    if before.role != after.role:
        details["role"] = after.role
    is_disabled = after.disabled_at is not None
    if is_disabled != (before.disabled_at is not None):
        details["disabled"] = is_disabled
    return Changed(after, Event("operator.change", after.name, details) if details else None)
