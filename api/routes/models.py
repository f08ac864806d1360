"""`/v1/models`: the base model and the caller's ready adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...adapters.classification import Task
from ...platform.adapters import service
from ...platform.adapters.models import Adapter
from ...platform.keys.principal import Principal, Scope
from ...platform.sessions import TenantSession
from ..contract.promises import answers
from ..formats.generation_errors import MODEL_ERRORS
from ..http.auth import require
from ..http.json_response import json_response
from ..http.request_context import split_key
from ..schemas.answers import ModelCard, ModelList
from ..server.runtime import CurrentRuntime, Runtime

router = APIRouter(prefix="/v1")

Caller = Annotated[Principal, Depends(require(Scope.INFER))]


@router.get("/models")
@answers(ModelList)
async def list_models(runtime: CurrentRuntime, principal: Caller) -> Response:
    """The base model and the adapters that the key can use."""
    base_id = runtime.engine.info.base_id

    def read(session: TenantSession) -> tuple[Sequence[Adapter], set[str]]:
        adapters = service.list_callable_adapters(session, base_id, names=principal.adapters)
        return adapters, service.list_classifier_ids(session, base_id)

    adapters, classifiers = await runtime.control_plane.read(principal.tenant_id, read)
    base = _base_card(runtime)
    cards = [
        _adapter_card(
            adapter,
            principal,
            parent=base.id,
            task=Task.of(is_classifier=adapter.id in classifiers),
        )
        for adapter in adapters
    ]
    return json_response(ModelList([base, *cards] if principal.may_use(None) else cards))


@router.get("/models/{model:path}")
@answers(ModelCard, errors=MODEL_ERRORS)
async def get_model(
    request: Request, model: str, runtime: CurrentRuntime, principal: Caller
) -> Response:
    """The model that answers a request for `model` with the same `X-Request-Id`."""
    served = await runtime.inference.models.resolve(principal, model, request_id=split_key(request))
    base = _base_card(runtime)
    if served.adapter is None:
        return json_response(base)
    name = served.adapter.name
    adapter = await runtime.control_plane.read(
        principal.tenant_id, lambda session: service.get_adapter(session, name)
    )
    created = int(adapter.created_at.timestamp())
    task = Task.of(is_classifier=served.classification is not None)
    card = ModelCard(model, created, principal.tenant_slug, served.name, base.id, task)
    return json_response(card)


def _base_card(runtime: Runtime) -> ModelCard:
    name = runtime.inference.served_model_name
    return ModelCard(name, runtime.started_at, "loraplex", name, None)


def _adapter_card(adapter: Adapter, principal: Principal, *, parent: str, task: Task) -> ModelCard:
    created = int(adapter.created_at.timestamp())
    full_name = f"{principal.tenant_slug}/{adapter.name}"
    return ModelCard(adapter.name, created, principal.tenant_slug, full_name, parent, task)
