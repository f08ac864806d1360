"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`: vLLM's names of pinning.

Adapters are pushed, never read from a path, so loading one means to pin its version to the device.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...platform.adapters.lookup import no_adapter
from ...platform.adapters.registry import AdapterRef
from ...platform.adapters.states import WishKind
from ...platform.keys.principal import Principal, Scope
from ..contract.promises import Raw, answers
from ..formats.generation_errors import MODEL_ERRORS
from ..http.auth import require
from ..http.bodies import json_body
from ..http.request_context import split_key
from ..schemas.lora_adapters import LoadAdapterBody, UnloadAdapterBody
from ..server.runtime import CurrentRuntime, Runtime
from .parameters import NO_VERSION, RequestOrigin
from .residency import remove_pin, wish_for

router = APIRouter(prefix="/v1")

Writer = Annotated[Principal, Depends(require(Scope.ADAPTERS_WRITE))]


@router.post("/load_lora_adapter")
@answers(Raw("text/plain"), errors=(*MODEL_ERRORS, *NO_VERSION, "too_many_pins"))
async def load_lora_adapter(
    request: Request,
    runtime: CurrentRuntime,
    principal: Writer,
    origin: RequestOrigin,
    body: Annotated[LoadAdapterBody, Depends(json_body(LoadAdapterBody))],
) -> Response:
    """Pin the version that a name means to the device.

    The response does not wait for the load; requests do.
    """
    found = await _find(request, runtime, principal, body.lora_name)
    await wish_for(runtime, principal, origin, found.name, found.version, WishKind.PIN)
    return Response(f"Success: LoRA adapter '{found.pinned}' is pinned.", media_type="text/plain")


@router.post("/unload_lora_adapter")
@answers(Raw("text/plain"), errors=(*MODEL_ERRORS, *NO_VERSION))
async def unload_lora_adapter(
    request: Request,
    runtime: CurrentRuntime,
    principal: Writer,
    origin: RequestOrigin,
    body: Annotated[UnloadAdapterBody, Depends(json_body(UnloadAdapterBody))],
) -> Response:
    """Unpin the version that a name means: it may be evicted, and stays pushed."""
    found = await _find(request, runtime, principal, body.lora_name)
    await remove_pin(runtime, principal, origin, found.name, found.version)
    return Response(
        f"Success: LoRA adapter '{found.pinned}' is not pinned.", media_type="text/plain"
    )


async def _find(request: Request, runtime: Runtime, principal: Principal, name: str) -> AdapterRef:
    """The version that the name means. The base and compositions are no adapters."""
    models = runtime.inference.models
    model = await models.resolve(principal, name, request_id=split_key(request))
    if model.adapter is None or model.composition is not None:
        raise no_adapter(name)
    return model.adapter
