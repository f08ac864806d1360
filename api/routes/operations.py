"""Whether the server lives, whether it serves, and its figures. Open to callers without a key."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from ..auth import check_metrics_access
from ..contract import Raw, answers, terms
from ..json_response import json_response
from ..openapi import openapi_json
from ..runtime import CurrentRuntime
from ..schemas.operations import Health

router = APIRouter()


@router.get("/health")
@answers(Health)
async def health() -> Response:
    """Whether the process lives.

    Whether the engine does is `/ready`'s to say.
    """
    return json_response(Health("ok"))


@router.get("/ready")
@answers(Health, errors=("engine_unavailable", "shutting_down"))
async def ready(runtime: CurrentRuntime) -> Response:
    """Whether generations are taken now.

    If not, the error says why in words.
    """
    runtime.readiness.check()
    return json_response(Health("ready"))


@router.get("/metrics")
@terms(scheme="metricsToken")
@answers(Raw("text/plain"), errors=("missing_api_key", "invalid_api_key"))
async def metrics(request: Request, runtime: CurrentRuntime) -> Response:
    """The figures of all tenants, for Prometheus.

    Open to callers on the same machine, or to those who send the operator's metrics token.
    """
    token = runtime.settings.metrics_token
    check_metrics_access(
        request, token.get_secret_value() if token else None, runtime.settings.trusted_proxies
    )
    return Response(runtime.metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.get("/openapi.json")
@answers(Raw("application/json"))
async def get_openapi_document(request: Request) -> Response:
    """This document.

    It is the same for everybody and holds nothing of anybody, so it needs no key.
    """
    document = await asyncio.to_thread(openapi_json, request.app)
    return Response(document, media_type="application/json")
