"""Whether the server lives, whether it serves, and its figures. Open to callers without a key."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..auth import check_metrics_access
from ..runtime import CurrentRuntime

router = APIRouter()


@router.get("/health")
async def health() -> Response:
    """The process answers; whether the engine does is `/ready`'s to say."""
    return JSONResponse({"status": "ok"})


@router.get("/ready")
async def ready(runtime: CurrentRuntime) -> Response:
    """Generations are taken now; if not, the error says why in words."""
    runtime.readiness.check()
    return JSONResponse({"status": "ready"})


@router.get("/metrics")
async def metrics(request: Request, runtime: CurrentRuntime) -> Response:
    """For Prometheus."""
    token = runtime.settings.metrics_token
    check_metrics_access(
        request, token.get_secret_value() if token else None, runtime.settings.trusted_proxies
    )
    return Response(runtime.metrics.render(), media_type=CONTENT_TYPE_LATEST)
