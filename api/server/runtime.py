"""All services of one server process: the only module that knows both planes.

They are opened before the first request and closed after the last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from ...adapters.confinement_probe import ConfinementReport
from ...adapters.fetcher_client import FetcherStats
from ...engine.config import EngineConfig
from ...engine.fleet.replica_view import ReplicaView
from ...engine.process.engine import Engine
from ...platform.idempotency.service import IdempotentAnswers
from ..adapters.deletions import Deletions
from ..adapters.downloads import Downloads
from ..adapters.pushes import Pushes
from ..adapters.reconciliation import Reconciliation
from ..batches.batches import Batches
from ..control_plane.control_plane import ControlPlane
from ..control_plane.refusals import Refusals
from ..control_plane.sign_in import SignIn
from ..evaluations.evaluations import Evaluations
from ..inference.inference import Inference
from ..inference.pricing import Pricing
from ..oidc.provider_sign_in import ProviderSignIn
from ..settings import Settings
from ..telemetry.canary_watch import CanaryWatch
from ..telemetry.memories import Memories
from ..telemetry.metrics import Metrics
from ..telemetry.overview import Overview
from ..telemetry.request_log import RequestLog
from ..telemetry.tracing import Tracing, open_tracing
from ..tuning.tuning import Tuning
from ..upkeep.tenant_deletions import TenantDeletions
from .adapter_services import AdapterServices, open_adapters
from .batch_services import open_batches
from .confinement import check_confinement
from .control_services import ControlServices, open_control
from .evaluation_services import open_evaluations
from .inference_services import InferenceServices, open_inference
from .planes import Planes, open_planes
from .readiness import Readiness
from .tuning_services import open_tuning


@dataclass(frozen=True, slots=True)
class Runtime:
    """The services that routes use."""

    settings: Settings
    engine_config: EngineConfig
    engine: Engine
    readiness: Readiness
    confinement: ConfinementReport
    control_plane: ControlPlane
    inference: Inference
    pricing: Pricing
    batches: Batches
    evaluations: Evaluations
    tuning: Tuning | None
    """None: the operator has not turned fine-tuning on."""
    pushes: Pushes
    deletions: Deletions
    tenant_deletions: TenantDeletions
    downloads: Downloads
    reconciliation: Reconciliation
    idempotent_answers: IdempotentAnswers
    request_log: RequestLog
    canary_watch: CanaryWatch
    refusals: Refusals
    sign_in: SignIn
    provider_sign_in: ProviderSignIn | None
    """None: the server has no identity provider."""
    memories: Memories
    overview: Overview
    fetcher_stats: Callable[[], FetcherStats]
    fleet_views: Callable[[], list[ReplicaView]]
    """Of the replicas that this server uses; none if the engine is its own."""
    metrics: Metrics
    started_at: int
    """Seconds since 1970."""
    tracing: Tracing | None


async def current_runtime(request: Request) -> Runtime:
    """The runtime of the request's app. It is a coroutine, because FastAPI would run a function in
    a thread."""
    runtime: Runtime = request.app.state.runtime
    return runtime


CurrentRuntime = Annotated[Runtime, Depends(current_runtime)]


@asynccontextmanager
async def open_runtime(settings: Settings, engine_config: EngineConfig) -> AsyncIterator[Runtime]:
    """Start all services and continue what an earlier run left unfinished.

    Raises DataDirInUse, or a PlatformError, EngineError or AdapterError if a part cannot start.
    """
    async with AsyncExitStack() as stack:
        tracing = open_tracing(is_wanted=settings.otel, environment=settings.telemetry_environment)
        if tracing:
            stack.push_async_callback(asyncio.to_thread, tracing.close)
        confinement = await check_confinement(is_required=settings.require_confinement)
        planes = await open_planes(settings, engine_config, stack)
        inference = open_inference(planes, stack)
        adapters = await open_adapters(planes, inference.metrics, stack)
        control = open_control(planes, inference.metrics, adapters.garbage, stack)
        readiness = Readiness(planes.engine)
        batches = open_batches(planes, inference, readiness, stack)
        evaluations = open_evaluations(planes, batches.files, readiness, stack)
        tuning = await open_tuning(
            planes,
            pushes=adapters.pushes,
            files=batches.files,
            metrics=inference.metrics,
            memories=inference.trainers,
            readiness=readiness,
            stack=stack,
        )
        runtime = _gather(
            planes,
            inference,
            adapters,
            control,
            readiness,
            batches,
            evaluations,
            tuning,
            confinement,
            tracing,
        )
        runtime.metrics.show_fleet(runtime.fleet_views)
        await _recover_and_start(planes, inference, adapters, control)
        evaluations.start()
        if tuning is not None:
            tuning.start()
        yield runtime


async def _recover_and_start(
    planes: Planes,
    inference: InferenceServices,
    adapters: AdapterServices,
    control: ControlServices,
) -> None:
    """Continue what an earlier run left unfinished, then start the background services."""
    await inference.metering.recover()
    await inference.admission.sweep()
    inference.admission.start()
    inference.budget_alerts.start()
    await planes.control_plane.write_all_tenants(control.idempotent_answers.recover)
    await control.presence.start()
    control.device_usage.start()
    inference.overview.start()
    inference.shadows.start()
    inference.canary_judge.start()
    adapters.attestations.start()
    await adapters.garbage.sweep_at_start()
    for service in (adapters.pushes, adapters.attestations, adapters.deletions):
        await service.recover()
    adapters.upload_room.start()
    adapters.reconciliation.start()
    control.request_log.start()
    inference.inference.samples.start()
    inference.canary_watch.start()
    control.refusals.start()
    adapters.garbage.start()
    control.jobs.start()
    adapters.tenant_deletions.start()
    if control.webhooks is not None:
        await control.webhooks.start()
    control.expiring_keys.start()


def _gather(
    planes: Planes,
    inference: InferenceServices,
    adapters: AdapterServices,
    control: ControlServices,
    readiness: Readiness,
    batches: Batches,
    evaluations: Evaluations,
    tuning: Tuning | None,
    confinement: ConfinementReport,
    tracing: Tracing | None,
) -> Runtime:
    return Runtime(
        settings=planes.settings,
        engine_config=planes.engine_config,
        engine=planes.engine,
        readiness=readiness,
        confinement=confinement,
        control_plane=planes.control_plane,
        inference=inference.inference,
        pricing=inference.pricing,
        batches=batches,
        evaluations=evaluations,
        tuning=tuning,
        pushes=adapters.pushes,
        deletions=adapters.deletions,
        tenant_deletions=adapters.tenant_deletions,
        downloads=adapters.downloads,
        reconciliation=adapters.reconciliation,
        idempotent_answers=control.idempotent_answers,
        request_log=control.request_log,
        canary_watch=inference.canary_watch,
        refusals=control.refusals,
        sign_in=control.sign_in,
        provider_sign_in=control.provider_sign_in,
        memories=inference.memories,
        overview=inference.overview,
        fetcher_stats=planes.fetcher.stats,
        fleet_views=planes.fleet_views,
        metrics=inference.metrics,
        started_at=int(time.time()),
        tracing=tracing,
    )
