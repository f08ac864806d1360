"""The HTTP application: routes, access control and error responses."""

from __future__ import annotations

from fastapi import APIRouter, Depends, FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from .http.auth import authenticate
from .http.console_files import ConsoleFiles
from .http.error_responses import install_error_handlers
from .http.idempotency import IdempotentRequests
from .http.request_context import RequestContext
from .routes import (
    adapters,
    alias_gates,
    aliases,
    audit,
    batches,
    budgets,
    caller_limits,
    chat,
    classification,
    completions,
    device,
    embeddings,
    evaluations,
    files,
    golden_sets,
    keys,
    lora_adapters,
    me,
    memory,
    messages,
    models,
    operations,
    operators,
    overview,
    prices,
    provider_sessions,
    quotas,
    readiness,
    replicas,
    requests,
    residency,
    responses,
    samples,
    scores,
    server_settings,
    servers,
    sessions,
    shadows,
    stored_responses,
    tenant_deletions,
    tenant_files,
    tenants,
    tokens,
    tuning_jobs,
    uploads,
    usage,
    users,
    webhooks,
)
from .server.runtime import Runtime

_CLOSED = (
    *(chat, completions, responses, messages, embeddings, classification, scores, tokens, models),
    *(stored_responses, tenant_files, batches, tuning_jobs, golden_sets, evaluations, alias_gates),
    *(adapters, aliases, shadows, samples, residency, lora_adapters, files, uploads),
    *(me, keys, users, quotas, usage, audit, webhooks),
    *(prices, budgets, caller_limits),
    *(requests, device, memory, overview),
    *(tenants, tenant_deletions, operators, servers, replicas, server_settings, readiness),
    sessions,
    provider_sessions,
)


def create_app(runtime: Runtime) -> FastAPI:
    """The application over an open runtime.

    Every route needs a key or a session, but for `operations` and signing in.
    """
    app = FastAPI(
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # Loraplex has its own spans and metrics; FastAPI would look for providers with every
        # request.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.runtime = runtime
    for router in (operations.router, sessions.open_router, provider_sessions.open_router):
        _add_routes(app, router)
    for module in _CLOSED:
        _add_routes(app, module.router, is_open=False)
    app.router.routes.extend(ConsoleFiles().routes)
    install_error_handlers(app)
    app.add_middleware(IdempotentRequests)
    app.add_middleware(RequestContext)
    return app


def _add_routes(app: FastAPI, router: APIRouter, *, is_open: bool = True) -> None:
    """Add the router's routes directly to the app: with nested routers, FastAPI searches each level
    for every request."""
    for route in router.routes:
        assert isinstance(route, APIRoute)
        # FastAPI walks through a dependency again for each mention, although it calls it once.
        is_ready = is_open or _authenticates(route.dependant)
        app.add_api_route(
            route.path,
            route.endpoint,
            methods=sorted(route.methods or ()),
            dependencies=[*([] if is_ready else [Depends(authenticate)]), *route.dependencies],
        )


def _authenticates(dependant: Dependant) -> bool:
    return any(each.call is authenticate or _authenticates(each) for each in dependant.dependencies)
