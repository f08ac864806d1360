"""`/v1/audit` and `/admin/audit`: the audit log and its verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import AwareDatetime
from starlette.responses import Response

from ...platform.audit import repository
from ...platform.audit.models import AuditEntry, PlatformAuditEntry
from ...platform.audit.repository import PLATFORM_CHAIN, AuditFilter
from ...platform.audit.verification import Verified
from ...platform.keys.principal import OperatorPrincipal, OperatorRole, Principal, Scope
from ...platform.names import MAX_SLUG_LENGTH
from ..contract.errors import ApiError
from ..contract.promises import answers
from ..http.auth import require, require_operator
from ..http.json_response import json_response
from ..schemas.adapters import PageView
from ..schemas.audit import AuditEntryView, BreachView, VerificationView
from ..schemas.me import ActorView
from ..server.runtime import CurrentRuntime
from .pages import Page, PageRequest

DEFAULT_VERIFIED = 2000
MAX_VERIFIED = 10_000
"""Entries that one request may have verified: a fraction of a second of work."""

router = APIRouter()

Entry = AuditEntry | PlatformAuditEntry

Auditor = Annotated[Principal, Depends(require(Scope.AUDIT_READ))]
Operator = Annotated[
    OperatorPrincipal, Depends(require_operator(OperatorRole.ADMIN, OperatorRole.VIEWER))
]
Text = Annotated[str | None, Query(max_length=255, pattern=r"^[^\x00]+$")]


async def read_filter(
    action: Text = None,
    actor: Text = None,
    resource: Text = None,
    since: AwareDatetime | None = None,
    until: AwareDatetime | None = None,
) -> AuditFilter:
    """A dependency that yields what the query asks for.

    `action` is a whole one or its noun, `actor` an id, a name or `kind:id`.
    """
    return AuditFilter(action=action, actor=actor, resource=resource, since=since, until=until)


Wanted = Annotated[AuditFilter, Depends(read_filter)]
OldestFirst = Annotated[bool, Query(description="Default: newest first.")]


@router.get("/v1/audit")
@answers(PageView[AuditEntryView])
async def list_entries(
    runtime: CurrentRuntime,
    principal: Auditor,
    wanted: Wanted,
    page: Page,
    oldest_first: OldestFirst = False,
) -> Response:
    """The changes within the tenant, by any actor."""
    after = _number(page)
    wanted = replace(wanted, adapters=principal.adapters)
    entries = await runtime.control_plane.read(
        principal.tenant_id,
        lambda session: repository.list_entries(
            session, wanted, after=after, limit=page.num_rows, oldest_first=oldest_first
        ),
    )
    return json_response(_answer(page, entries))


@router.get("/admin/audit")
@answers(PageView[AuditEntryView])
async def list_platform_entries(
    runtime: CurrentRuntime,
    operator: Operator,
    wanted: Wanted,
    page: Page,
    oldest_first: OldestFirst = False,
) -> Response:
    """The platform's changes: tenants, operators and their keys."""
    after = _number(page)
    entries = await runtime.control_plane.read_all_tenants(
        lambda session: repository.list_platform_entries(
            session, wanted, after=after, limit=page.num_rows, oldest_first=oldest_first
        )
    )
    return json_response(_answer(page, entries))


@router.get("/admin/audit/verification")
@answers(VerificationView, errors=("tenant_not_found",))
async def verify(
    runtime: CurrentRuntime,
    operator: Operator,
    tenant: Annotated[str | None, Query(max_length=MAX_SLUG_LENGTH)] = None,
    after: Annotated[int, Query(ge=0, le=1 << 62)] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_VERIFIED)] = DEFAULT_VERIFIED,
) -> Response:
    """Verify a part of the hash chain of a tenant or of the platform."""
    verified = await runtime.control_plane.verify_audit(tenant, after=after, limit=limit)
    return json_response(_verification_view(tenant or PLATFORM_CHAIN, verified))


def _number(page: PageRequest) -> int | None:
    if page.after is None:
        return None
    if not (page.after.isascii() and page.after.isdecimal() and len(page.after) <= 18):
        raise ApiError("invalid_parameter", "after: not a cursor of this list.", param="after")
    return int(page.after)


def _answer(page: PageRequest, entries: Sequence[Entry]) -> PageView[AuditEntryView]:
    return page.answer(entries, view=_entry_view, cursor=lambda entry: str(entry.number))


def _entry_view(entry: Entry) -> AuditEntryView:
    return AuditEntryView(
        number=entry.number,
        at=entry.at,
        actor=ActorView(entry.actor_kind, entry.actor_id, entry.actor_name),
        action=entry.action,
        resource=entry.resource,
        details=entry.details,
        request_id=entry.request_id,
        address=entry.address,
        hash=entry.hash.hex(),
    )


def _verification_view(chain: str, verified: Verified) -> VerificationView:
    breach = verified.breach
    return VerificationView(
        chain=chain,
        is_intact=breach is None,
        is_finished=verified.is_finished,
        last_number=verified.last_number,
        breach=None if breach is None else BreachView(breach.number, breach.reason),
    )
