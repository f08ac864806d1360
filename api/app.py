"""The HTTP application: routes, who may call them, and how errors look."""

from __future__ import annotations

from fastapi import APIRouter, Depends, FastAPI

from .auth import authenticate
from .console_files import ConsoleFiles
from .errors import install_error_handlers
from .idempotency import IdempotentRequests
from .request_context import RequestContext
from .routes import (
    adapters,
    aliases,
    audit,
    chat,
    completions,
    device,
    embeddings,
    files,
    keys,
    me,
    memory,
    models,
    operations,
    operators,
    overview,
    quotas,
    requests,
    residency,
    responses,
    server_settings,
    servers,
    sessions,
    tenants,
    tokens,
    uploads,
    usage,
    users,
)
from .runtime import Runtime

_CLOSED = (
    *(chat, completions, responses, embeddings, tokens, models),
    *(adapters, aliases, residency, files, uploads),
    *(me, keys, users, quotas, usage, audit),
    *(requests, device, memory, overview),
    *(tenants, operators, servers, server_settings),
    sessions,
)


def create_app(runtime: Runtime) -> FastAPI:
    """The application over an open runtime.

    Every route needs a key or a session: the dependency stands on the root router, and only
    `operations` and signing in are outside of it.
    """
    app = FastAPI(
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # Spans and metrics are our own; FastAPI's would look for providers with every request.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.runtime = runtime
    app.include_router(operations.router)
    app.include_router(sessions.open_router)
    app.include_router(_closed_routes())
    app.router.routes.extend(ConsoleFiles().routes)
    install_error_handlers(app)
    app.add_middleware(IdempotentRequests)
    app.add_middleware(RequestContext)
    return app


def _closed_routes() -> APIRouter:
    root = APIRouter(dependencies=[Depends(authenticate)])
    for module in _CLOSED:
        root.include_router(module.router)
    return root
