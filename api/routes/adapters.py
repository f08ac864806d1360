"""`/v1/adapters` and `/v1/base`: what there is, under which names, and how it goes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path
from starlette.responses import Response

from ...platform.adapters import service
from ...platform.keys.principal import Principal, Scope
from ..auth import require
from ..bodies import json_body
from ..json_response import json_response
from ..runtime import CurrentRuntime, Runtime
from ..schemas.adapters import AdapterView, AliasBody, AliasView, ListView, VersionView
from .adapter_views import AdapterViews, base_view, deletion_receipt

router = APIRouter(prefix="/v1")

Reader = Annotated[Principal, Depends(require(Scope.ADAPTERS_READ))]
Writer = Annotated[Principal, Depends(require(Scope.ADAPTERS_WRITE))]
Number = Annotated[int, Path(ge=1, le=999_999_999)]


@router.get("/base")
async def get_base(runtime: CurrentRuntime, principal: Reader) -> Response:
    """What an adapter must fit."""
    return json_response(base_view(runtime.inference.served_model_name, runtime.engine.info))


@router.get("/adapters")
async def list_adapters(runtime: CurrentRuntime, principal: Reader) -> Response:
    adapters = await runtime.control_plane.read(principal.tenant_id, service.list_adapters)
    views = _views(runtime, principal)
    return json_response(ListView([views.adapter(adapter) for adapter in adapters]))


@router.get("/adapters/{name}")
async def get_adapter(runtime: CurrentRuntime, principal: Reader, name: str) -> Response:
    return json_response(await _adapter(runtime, principal, name))


@router.get("/adapters/{name}/versions")
async def list_versions(runtime: CurrentRuntime, principal: Reader, name: str) -> Response:
    adapter = await _adapter(runtime, principal, name)
    return json_response(ListView(list(adapter.versions)))


@router.get("/adapters/{name}/versions/{number}")
async def get_version(
    runtime: CurrentRuntime, principal: Reader, name: str, number: Number
) -> Response:
    return json_response(await version_view(runtime, principal, name, number))


@router.put("/adapters/{name}/aliases/{alias}")
async def set_alias(
    runtime: CurrentRuntime,
    principal: Writer,
    name: str,
    alias: str,
    body: Annotated[AliasBody, Depends(json_body(AliasBody))],
) -> Response:
    """Requests admitted from now on follow the alias; running ones stay where they began."""
    await runtime.control_plane.write(
        principal.tenant_id,
        lambda session: service.set_alias(session, name, alias, body.version),
    )
    return json_response(AliasView(name, alias, body.version))


@router.delete("/adapters/{name}/aliases/{alias}")
async def remove_alias(
    runtime: CurrentRuntime, principal: Writer, name: str, alias: str
) -> Response:
    await runtime.control_plane.write(
        principal.tenant_id, lambda session: service.remove_alias(session, name, alias)
    )
    return Response(status_code=204)


@router.delete("/adapters/{name}")
async def delete_adapter(runtime: CurrentRuntime, principal: Writer, name: str) -> Response:
    """Answered once nothing is left on the device, in memory, on disk and in the store."""
    deletions = await runtime.deletions.delete_adapter(principal.tenant_id, name)
    return json_response(deletion_receipt(name, deletions))


@router.delete("/adapters/{name}/versions/{number}")
async def delete_version(
    runtime: CurrentRuntime, principal: Writer, name: str, number: Number
) -> Response:
    deletion = await runtime.deletions.delete_version(principal.tenant_id, name, number)
    return json_response(deletion_receipt(name, [deletion]))


async def version_view(
    runtime: Runtime, principal: Principal, name: str, number: int
) -> VersionView:
    """One version as its tenant sees it. Raises AdapterNotFound or VersionNotFound."""
    adapter, version = await runtime.control_plane.read(
        principal.tenant_id,
        lambda session: (
            service.get_adapter(session, name),
            service.get_version(session, name, number),
        ),
    )
    return _views(runtime, principal).version(adapter, version)


async def _adapter(runtime: Runtime, principal: Principal, name: str) -> AdapterView:
    adapter = await runtime.control_plane.read(
        principal.tenant_id, lambda session: service.get_adapter(session, name)
    )
    return _views(runtime, principal).adapter(adapter)


def _views(runtime: Runtime, principal: Principal) -> AdapterViews:
    return AdapterViews(principal.tenant_slug, runtime.engine.stats)
