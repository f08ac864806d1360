"""`/v1/adapters` and `/v1/base`: what there is, what became of it, and its end."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from ...adapters.layout import layout_to_json
from ...platform.adapters import service
from ...platform.keys.principal import Principal
from ..contract import Raw, answers
from ..json_response import json_response
from ..pages import Page
from ..runtime import CurrentRuntime, Runtime
from ..schemas.adapters import (
    AdapterView,
    BaseView,
    DeletionsView,
    DeletionView,
    ListView,
    PageView,
    TransitionView,
    VersionView,
)
from .adapter_views import AdapterViews, base_view, deletion_view, transition_view
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

router = APIRouter(prefix="/v1")

DrainSeconds = Annotated[float, Query(ge=0, le=MAX_DRAIN_SECONDS)]


@router.get("/base")
@answers(BaseView)
async def get_base(runtime: CurrentRuntime, principal: Reader) -> Response:
    """What an adapter must fit."""
    view = base_view(
        runtime.inference.served_model_name,
        runtime.engine.info,
        max_full_matrix_bytes=runtime.settings.max_full_matrix_bytes,
    )
    return json_response(view)


@router.get("/base/layout")
@answers(Raw("application/json"))
async def get_base_layout(runtime: CurrentRuntime, principal: Reader) -> Response:
    """The base's layers by name and shape: what `loraplex adapters validate` binds to."""
    layout = layout_to_json(runtime.engine.info.layout)
    return Response(layout, media_type="application/json")


@router.get("/adapters")
@answers(PageView[AdapterView])
async def list_adapters(
    runtime: CurrentRuntime,
    principal: Reader,
    page: Page,
) -> Response:
    """The adapters by name, in pages. The cursor is a name."""
    adapters = await runtime.control_plane.read(
        principal.tenant_id,
        lambda session: service.list_adapters(
            session, after=page.after, limit=page.num_rows, names=principal.adapters
        ),
    )
    views = AdapterViews(principal.tenant_slug, runtime.engine.stats)
    answer = page.answer(adapters, view=views.adapter, cursor=lambda adapter: adapter.name)
    return json_response(answer)


@router.get("/adapters/{name}")
@answers(AdapterView, errors=("adapter_not_found",))
async def get_adapter(runtime: CurrentRuntime, principal: Reader, name: str) -> Response:
    """One adapter with its versions and aliases."""
    return json_response(await _adapter(runtime, principal, name))


@router.get("/adapters/{name}/versions")
@answers(ListView[VersionView], errors=("adapter_not_found",))
async def list_versions(runtime: CurrentRuntime, principal: Reader, name: str) -> Response:
    """The adapter's versions, the first first."""
    adapter = await _adapter(runtime, principal, name)
    return json_response(ListView(list(adapter.versions)))


@router.get("/adapters/{name}/versions/{number}")
@answers(VersionView, errors=NO_VERSION)
async def get_version(
    runtime: CurrentRuntime, principal: Reader, name: str, number: Number
) -> Response:
    """One version: its state, what intake found, what attestation measured."""
    found = await find_version(runtime, principal, name, number)
    views = AdapterViews(principal.tenant_slug, runtime.engine.stats)
    return json_response(views.version(*found))


@router.get("/adapters/{name}/versions/{number}/history")
@answers(ListView[TransitionView], errors=NO_VERSION)
async def get_version_history(
    runtime: CurrentRuntime, principal: Reader, name: str, number: Number
) -> Response:
    """Every state that the version entered, the first first."""
    transitions = await runtime.control_plane.read(
        principal.tenant_id, lambda session: service.list_transitions(session, name, number)
    )
    return json_response(ListView([transition_view(entry) for entry in transitions]))


@router.get("/adapters/{name}/deletions")
@answers(ListView[DeletionView], errors=("adapter_not_found",))
async def list_deletions(runtime: CurrentRuntime, principal: Reader, name: str) -> Response:
    """The receipts of what was deleted, also of an adapter of which nothing is left."""
    receipts = await runtime.control_plane.read(
        principal.tenant_id, lambda session: service.list_receipts(session, name)
    )
    return json_response(ListView([deletion_view(receipt) for receipt in receipts]))


@router.delete("/adapters/{name}")
@answers(DeletionsView, errors=("adapter_not_found", *DELETION_ERRORS))
async def delete_adapter(
    runtime: CurrentRuntime,
    principal: Writer,
    origin: RequestOrigin,
    name: str,
    drain_seconds: DrainSeconds = DEFAULT_DRAIN_SECONDS,
) -> Response:
    """Delete the adapter with all its versions.

    Answered once nothing is left on the device, in memory, on disk and in the store. Running
    requests may finish within `drain_seconds`; then they end with `adapter_deleted`.
    """
    deletions = await runtime.deletions.delete_adapter(
        principal.tenant_id, name, origin, drain_seconds=drain_seconds
    )
    numbers = {deletion.number for deletion in deletions}
    return json_response(await _receipts(runtime, principal, name, numbers))


@router.delete("/adapters/{name}/versions/{number}")
@answers(DeletionsView, errors=("version_aliased", *NO_VERSION, *DELETION_ERRORS))
async def delete_version(
    runtime: CurrentRuntime,
    principal: Writer,
    origin: RequestOrigin,
    name: str,
    number: Number,
    drain_seconds: DrainSeconds = DEFAULT_DRAIN_SECONDS,
) -> Response:
    """Delete one version.

    Answered once nothing is left of it, like the deletion of an adapter.
    """
    await runtime.deletions.delete_version(
        principal.tenant_id, name, number, origin, drain_seconds=drain_seconds
    )
    return json_response(await _receipts(runtime, principal, name, {number}))


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
