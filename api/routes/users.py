"""`/v1/users`: the tenant's users and their roles."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from ...platform.accounts.service import AccountService, IssuedInvitation
from ...platform.audit.event import Changed, Event
from ...platform.identities import service as identities
from ...platform.keys.principal import Principal, Scope, TenantRole
from ...platform.keys.service import ApiKeyService
from ...platform.sessions import TenantSession
from ...platform.users import service
from ..contract.errors import ApiError
from ..contract.promises import answers
from ..http.auth import Confirmation, Confirmed, origin_of, read_confirmation, require
from ..http.bodies import json_body
from ..http.browser import base_url, transport_of
from ..http.etags import TAGGED, IfMatch, tagged_response
from ..http.json_response import json_response
from ..schemas.adapters import PageView
from ..schemas.identity import IdentityBody, IdentityView, UserBody, UserChange, UserView
from ..schemas.sessions import InvitationView
from ..server.runtime import CurrentRuntime
from .identity_views import identity_view, invitation_view, user_view
from .pages import Page

router = APIRouter(prefix="/v1/users")

Manager = Annotated[Principal, Depends(require(Scope.USERS_MANAGE))]


@router.get("")
@answers(PageView[UserView])
async def list_users(
    runtime: CurrentRuntime,
    principal: Manager,
    page: Page,
    email: Annotated[str | None, Query(max_length=254)] = None,
    role: Annotated[TenantRole | None, Query()] = None,
    disabled: Annotated[bool | None, Query()] = None,
) -> Response:
    """List the tenant's users by email address."""
    rows = await runtime.control_plane.read(
        principal.tenant_id,
        lambda session: service.list_users(
            session,
            after=page.after,
            limit=page.num_rows,
            email=email,
            role=role,
            is_disabled=disabled,
        ),
    )
    return json_response(page.answer(rows, view=user_view, cursor=lambda user: user.email))


@router.post("")
@answers(UserView, 201, errors=("user_exists", "grant_too_wide", "quota_exceeded"), headers=TAGGED)
async def create_user(
    request: Request,
    runtime: CurrentRuntime,
    principal: Manager,
    body: Annotated[UserBody, Depends(json_body(UserBody))],
) -> Response:
    """Add a user.

    The user has no key yet.
    """

    def add(session: TenantSession) -> Changed[UserView]:
        user = service.add_user(session, body.email, body.role, by=principal)
        event = Event("user.create", user.id, {"email": user.email, "role": user.role})
        return Changed(user_view(user), event)

    view = await runtime.control_plane.change(
        principal.tenant_id, origin_of(request, principal), add
    )
    return tagged_response(view, status_code=201)


@router.get("/{user_id}")
@answers(UserView, errors=("user_not_found",), headers=TAGGED)
async def get_user(runtime: CurrentRuntime, principal: Manager, user_id: str) -> Response:
    """One user: email address, role and state."""
    user = await runtime.control_plane.read(
        principal.tenant_id, lambda session: service.get_user(session, user_id)
    )
    return tagged_response(user_view(user))


@router.patch("/{user_id}")
@answers(
    UserView,
    errors=(
        *("user_not_found", "grant_too_wide", "own_account", "last_administrator"),
        "quota_exceeded",
    ),
    headers=TAGGED,
)
async def change_user(
    request: Request,
    runtime: CurrentRuntime,
    principal: Manager,
    user_id: str,
    if_match: IfMatch,
    confirmation: Annotated[Confirmation, Depends(read_confirmation)],
    body: Annotated[UserChange, Depends(json_body(UserChange))],
) -> Response:
    """Change a user's role, disable or enable it.

    Disabling revokes the user's keys permanently and ends its password and sessions. You cannot
    change yourself or the last active owner. In a session, a change of role requires a recent
    password confirmation.
    """
    if "role" in body.model_fields_set:
        confirmation.check()
    keys, accounts = runtime.control_plane.keys, runtime.control_plane.accounts

    def change(session: TenantSession) -> Changed[UserView]:
        before = user_view(service.get_user_to_change(session, user_id))
        if_match.check(before)
        num_revoked = _apply(keys, accounts, session, user_id, body, principal)
        after = user_view(service.get_user(session, user_id))
        return _changed(before, after, num_revoked)

    view = await runtime.control_plane.change(
        principal.tenant_id, origin_of(request, principal), change
    )
    return tagged_response(view)


@router.post("/{user_id}/invitation")
@answers(InvitationView, 201, errors=("user_not_found", "grant_too_wide", "state_conflict"))
async def invite_user(
    request: Request,
    runtime: CurrentRuntime,
    principal: Manager,
    confirmed: Confirmed,
    user_id: str,
) -> Response:
    """Create an invitation to set a console password; valid once and for a day.

    An earlier invitation becomes invalid. The current password stays valid until this invitation is
    used.
    """
    accounts = runtime.control_plane.accounts

    def invite(session: TenantSession) -> Changed[IssuedInvitation]:
        user = service.get_user_to_invite(session, user_id, by=principal)
        issued = accounts.invite_user(session, user)
        return Changed(issued, Event("user.invite", user.id))

    origin = origin_of(request, principal)
    issued = await runtime.control_plane.change(principal.tenant_id, origin, invite)
    transport = transport_of(request, runtime.settings.trusted_proxies)
    return json_response(invitation_view(issued, base_url(request, transport)), status_code=201)


@router.get("/{user_id}/identity")
@answers(IdentityView, errors=("user_not_found", "identity_not_found"))
async def get_identity(runtime: CurrentRuntime, principal: Manager, user_id: str) -> Response:
    """The person at the identity provider who signs in as this user."""

    def read(session: TenantSession) -> IdentityView:
        return identity_view(
            identities.get_identity(session, service.get_user(session, user_id).id)
        )

    return json_response(await runtime.control_plane.read(principal.tenant_id, read))


@router.put("/{user_id}/identity")
@answers(
    IdentityView,
    errors=(
        *("user_not_found", "grant_too_wide", "identity_conflict"),
        "identity_provider_missing",
    ),
)
async def link_user(
    request: Request,
    runtime: CurrentRuntime,
    principal: Manager,
    confirmed: Confirmed,
    user_id: str,
    body: Annotated[IdentityBody, Depends(json_body(IdentityBody))],
) -> Response:
    """Let a person of the identity provider sign in as this user, instead of an earlier one.

    This ends the user's sessions. At the next sign-in the person's groups set the role.
    """
    accounts = runtime.control_plane.accounts

    def link(session: TenantSession) -> Changed[IdentityView]:
        user = service.get_user_to_invite(session, user_id, by=principal)
        issuer = runtime.settings.oidc_issuer
        if issuer is None:
            raise ApiError("identity_provider_missing")
        is_changed = identities.link(session, user, issuer, body.subject)
        if is_changed:
            accounts.end_all(session, user.id)
        view = identity_view(identities.get_identity(session, user.id))
        event = Event("user.link", user.id, {"issuer": issuer, "subject": body.subject})
        return Changed(view, event if is_changed else None)

    origin = origin_of(request, principal)
    view = await runtime.control_plane.change(principal.tenant_id, origin, link)
    return json_response(view)


@router.delete("/{user_id}/identity")
@answers(errors=("user_not_found", "grant_too_wide", "identity_not_found"))
async def unlink_user(
    request: Request,
    runtime: CurrentRuntime,
    principal: Manager,
    confirmed: Confirmed,
    user_id: str,
) -> Response:
    """Take the identity away, which ends the user's sessions.

    The person is then unknown to the tenant.
    """
    accounts = runtime.control_plane.accounts

    def unlink(session: TenantSession) -> Changed[None]:
        user = service.get_user_to_invite(session, user_id, by=principal)
        identities.unlink(session, user.id)
        accounts.end_all(session, user.id)
        return Changed(None, Event("user.unlink", user.id))

    origin = origin_of(request, principal)
    await runtime.control_plane.change(principal.tenant_id, origin, unlink)
    return Response(status_code=204)


def _apply(
    keys: ApiKeyService,
    accounts: AccountService,
    session: TenantSession,
    user_id: str,
    body: UserChange,
    by: Principal,
) -> int:
    """Number of keys this revoked."""
    sent = body.model_fields_set
    if "role" in sent:
        service.change_role(session, user_id, body.role, by=by)
    if "disabled" in sent and body.disabled:
        service.disable_user(session, user_id, by=by)
        accounts.close(session, user_id)
        return keys.revoke_keys_of_user(session, user_id)
    if "disabled" in sent:
        service.enable_user(session, user_id, by=by)
    return 0


def _changed(before: UserView, after: UserView, num_revoked: int) -> Changed[UserView]:
    details: dict[str, Any] = {}
    if before.role != after.role:
        details["role"] = after.role
    is_disabled = after.disabled_at is not None
    if is_disabled != (before.disabled_at is not None):
        details["disabled"] = is_disabled
    if num_revoked:
        details["revoked_keys"] = num_revoked
    return Changed(after, Event("user.change", after.id, details) if details else None)
