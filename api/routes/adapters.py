"""`/v1/adapters` and `/v1/base`: list, inspect and delete adapters; the served base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from ...adapters.layout import layout_to_json
from ...platform.adapters import service
from ...platform.adapters.listing import (
    AdapterOrder,
    AdapterQuery,
    AdapterSummary,
    list_summaries,
)
from ...platform.adapters.states import VersionState
from ...platform.keys.principal import OperatorPrincipal, OperatorRole, Principal
from ..contract.promises import Raw, answers
from ..http.auth import Confirmed, require_operator
from ..http.json_response import json_response
from ..schemas.adapters import (
    AdapterSummaryView,
    AdapterView,
    BaseView,
    DeletionsView,
    DeletionView,
    ListView,
    PageView,
    TransitionView,
    VersionView,
)
from ..server.runtime import CurrentRuntime, Runtime
from .adapter_views import (
    AdapterViews,
    base_view,
    deletion_view,
    summary_view,
    tiers_of,
    transition_view,
)
from .pages import Page, PageRequest
from .parameters import NO_VERSION, Number, Reader, RequestOrigin, Writer, find_version

DEFAULT_DRAIN_SECONDS = 30.0
MAX_DRAIN_SECONDS = 600.0

DELETION_ERRORS = (
    "state_conflict",
    "engine_unavailable",
    "engine_restarted",
    "store_unavailable",
    "store_denied",
)

router = APIRouter()

Operator = Annotated[OperatorPrincipal, Depends(require_operator(*OperatorRole))]
DrainSeconds = Annotated[float, Query(ge=0, le=MAX_DRAIN_SECONDS)]


async def read_wanted(
    search: Annotated[
        str | None, Query(min_length=1, max_length=64, description="Part of the name.")
    ] = None,
    sort: Annotated[AdapterOrder, Query()] = AdapterOrder.NAME,
    state: Annotated[VersionState | None, Query(description="Of the latest version.")] = None,
) -> AdapterQuery:
    """The filters and the order of the list."""
    return AdapterQuery(search=search, order=sort, state=state)


Wanted = Annotated[AdapterQuery, Depends(read_wanted)]


@router.get("/v1/base")
@answers(BaseView)
async def get_base(runtime: CurrentRuntime, principal: Reader) -> Response:
    """The base model."""
    view = base_view(
        runtime.inference.served_model_name,
        runtime.engine.info,
        num_tokens=runtime.inference.tokenizer.vocab_size,
        max_full_matrix_bytes=runtime.settings.max_full_matrix_bytes,
    )
    return json_response(view)


@router.get("/v1/base/layout")
@answers(Raw("application/json"))
async def get_base_layout(runtime: CurrentRuntime, principal: Reader) -> Response:
    """The base's layers by name and shape, as used by `loraplex adapters validate`."""
    layout = layout_to_json(runtime.engine.info.layout)
    return Response(layout, media_type="application/json")


@router.get("/v1/adapters")
@answers(PageView[AdapterSummaryView])
async def list_adapters(
    runtime: CurrentRuntime, principal: Reader, page: Page, wanted: Wanted
) -> Response:
    """List adapters, by default ordered by name; paged."""
    query = wanted._replace(names=principal.adapters)
    rows = await runtime.control_plane.read(
        principal.tenant_id,
        lambda session: list_summaries(session, query, after=page.after, limit=page.num_rows),
    )
    return json_response(_page_of_summaries(runtime, page, rows))


@router.get("/admin/adapters")
@answers(PageView[AdapterSummaryView])
async def list_adapters_of_all_tenants(
    runtime: CurrentRuntime,
    operator: Operator,
    page: Page,
    wanted: Wanted,
    tenant: Annotated[str | None, Query(max_length=64)] = None,
) -> Response:
    """List the adapters of all tenants or of one."""
    query = wanted._replace(tenant_slug=tenant)
    rows = await runtime.control_plane.read_all_tenants(
        lambda session: list_summaries(session, query, after=page.after, limit=page.num_rows)
    )
    return json_response(_page_of_summaries(runtime, page, rows))


@router.get("/v1/adapters/{name}")
@answers(AdapterView, errors=("adapter_not_found",))
async def get_adapter(runtime: CurrentRuntime, principal: Reader, name: str) -> Response:
    """One adapter with its versions and aliases."""
    return json_response(await _adapter(runtime, principal, name))


@router.get("/v1/adapters/{name}/versions")
@answers(ListView[VersionView], errors=("adapter_not_found",))
async def list_versions(runtime: CurrentRuntime, principal: Reader, name: str) -> Response:
    """The adapter's versions, oldest first."""
    adapter = await _adapter(runtime, principal, name)
    return json_response(ListView(list(adapter.versions)))


@router.get("/v1/adapters/{name}/versions/{number}")
@answers(VersionView, errors=NO_VERSION)
async def get_version(
    runtime: CurrentRuntime, principal: Reader, name: str, number: Number
) -> Response:
    """One version: its state, intake report and attestation."""
    found = await find_version(runtime, principal, name, number)
    views = AdapterViews(principal.tenant_slug, runtime.engine.stats)
    return json_response(views.version(*found))


@router.get("/v1/adapters/{name}/versions/{number}/history")
@answers(ListView[TransitionView], errors=NO_VERSION)
async def get_version_history(
    runtime: CurrentRuntime, principal: Reader, name: str, number: Number
) -> Response:
    """The version's state transitions, oldest first."""
    transitions = await runtime.control_plane.read(
        principal.tenant_id, lambda session: service.list_transitions(session, name, number)
    )
    return json_response(ListView([transition_view(entry) for entry in transitions]))


@router.get("/v1/adapters/{name}/deletions")
@answers(ListView[DeletionView], errors=("adapter_not_found",))
async def list_deletions(runtime: CurrentRuntime, principal: Reader, name: str) -> Response:
    """The receipts of deleted versions; available after the adapter itself is deleted."""
    receipts = await runtime.control_plane.read(
        principal.tenant_id, lambda session: service.list_receipts(session, name)
    )
    return json_response(ListView([deletion_view(receipt) for receipt in receipts]))


@router.delete("/v1/adapters/{name}")
@answers(DeletionsView, errors=("adapter_not_found", *DELETION_ERRORS))
async def delete_adapter(
    runtime: CurrentRuntime,
    principal: Writer,
    confirmed: Confirmed,
    origin: RequestOrigin,
    name: str,
    drain_seconds: DrainSeconds = DEFAULT_DRAIN_SECONDS,
) -> Response:
    """Delete the adapter with all its versions.

    Returns when nothing is left on the device, in memory, on disk and in the store. Running
    requests may finish within `drain_seconds`, then they end with `adapter_deleted`.
    """
    deletions = await runtime.deletions.delete_adapter(
        principal.tenant_id, name, origin, drain_seconds=drain_seconds
    )
    numbers = {deletion.number for deletion in deletions}
    return json_response(await _receipts(runtime, principal, name, numbers))


@router.delete("/v1/adapters/{name}/versions/{number}")
@answers(DeletionsView, errors=("version_aliased", *NO_VERSION, *DELETION_ERRORS))
async def delete_version(
    runtime: CurrentRuntime,
    principal: Writer,
    confirmed: Confirmed,
    origin: RequestOrigin,
    name: str,
    number: Number,
    drain_seconds: DrainSeconds = DEFAULT_DRAIN_SECONDS,
) -> Response:
    """Delete one version.

    Returns when nothing is left of it, like the deletion of an adapter.
    """
    await runtime.deletions.delete_version(
        principal.tenant_id, name, number, origin, drain_seconds=drain_seconds
    )
    return json_response(await _receipts(runtime, principal, name, {number}))


def _page_of_summaries(
    runtime: Runtime, page: PageRequest, rows: Sequence[AdapterSummary]
) -> PageView[AdapterSummaryView]:
    tiers = tiers_of(runtime.engine.stats)
    return page.answer(
        rows, view=lambda row: summary_view(row, tiers), cursor=lambda row: row.cursor
    )


async def _adapter(runtime: Runtime, principal: Principal, name: str) -> AdapterView:
    adapter = await runtime.control_plane.read(
        principal.tenant_id, lambda session: service.get_adapter(session, name)
    )
    return AdapterViews(principal.tenant_slug, runtime.engine.stats).adapter(adapter)


async def _receipts(
    runtime: Runtime, principal: Principal, name: str, numbers: set[int]
) -> DeletionsView:
    """What was written down about the deletion of these versions."""
    receipts = await runtime.control_plane.read(
        principal.tenant_id, lambda session: service.list_receipts(session, name)
    )
    views = [deletion_view(receipt) for receipt in receipts]
    return DeletionsView(name, [view for view in views if view.version in numbers])
