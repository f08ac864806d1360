"""Health, readiness and metrics. Open to callers without a key."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from ..contract.promises import Raw, answers, terms
from ..http.auth import check_metrics_access
from ..http.json_response import json_response
from ..http.openapi import openapi_json
from ..schemas.operations import Health
from ..server.runtime import CurrentRuntime

router = APIRouter()


@router.get("/health")
@answers(Health)
async def health() -> Response:
    """Whether the process is alive.

    For the engine, see `/ready`.
    """
    return json_response(Health("ok"))


@router.get("/ready")
@answers(Health, errors=("engine_unavailable", "shutting_down"))
async def ready(runtime: CurrentRuntime) -> Response:
    """Whether the server accepts generation requests.

    If not, the error states the reason.
    """
    runtime.readiness.check()
    return json_response(Health("ready"))


@router.get("/metrics")
@terms(scheme="metricsToken")
@answers(Raw("text/plain"), errors=("missing_api_key", "invalid_api_key"))
async def metrics(request: Request, runtime: CurrentRuntime) -> Response:
    """Metrics of all tenants, for Prometheus.

    Available to callers on the same machine, in the operator's metrics networks, or with the
    operator's metrics token.
    """
    settings = runtime.settings
    token = settings.metrics_token
    check_metrics_access(
        request,
        token.get_secret_value() if token else None,
        settings.trusted_proxies,
        settings.metrics_networks,
    )
    return Response(runtime.metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.get("/openapi.json")
@answers(Raw("application/json"))
async def get_openapi_document(request: Request) -> Response:
    """This document.

    It is the same for every caller and contains no private data, so it needs no key.
    """
    document = await asyncio.to_thread(openapi_json, request.app)
    return Response(document, media_type="application/json")
