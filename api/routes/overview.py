"""`/v1/overview` and `/admin/overview`: rates, latencies and utilization over time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from ...platform.keys.principal import OperatorPrincipal, OperatorRole, Principal, Scope
from ...platform.overview import service
from ...platform.overview.figures import MET, FigureSums
from ...platform.overview.latencies import percentile
from ...platform.overview.service import RANGES, Step, TenantTokens, Window, moment_of
from ..contract.promises import answers
from ..http.auth import require, require_operator
from ..http.json_response import json_response
from ..schemas.overview import (
    ObjectiveView,
    OverviewNow,
    OverviewSeries,
    OverviewView,
    PlatformOverviewView,
    RangeName,
    Series,
    TenantLoadView,
)
from ..server.runtime import CurrentRuntime
from ..telemetry.memories import SeenMap
from ..telemetry.overview import device_bytes

MAX_TENANTS = 50
"""Whose series are in the answer: those that generated most."""
RESULTS = (MET, "ttft", "itl", "refused", "failed")
"""Of sequences with a service level objective."""

router = APIRouter()

Reader = Annotated[Principal, Depends(require(Scope.USAGE_READ))]
Operator = Annotated[OperatorPrincipal, Depends(require_operator(*OperatorRole))]
Range = Annotated[RangeName, Query(alias="range", description="The time range.")]


@router.get("/v1/overview")
@answers(OverviewView)
async def get_overview(
    runtime: CurrentRuntime, principal: Reader, range_name: Range = "1h"
) -> Response:
    """The tenant's figures over time, across all servers."""
    await runtime.overview.freshen()
    window = Window(RANGES[range_name], time.time())
    plane, tenant_id = runtime.control_plane, principal.tenant_id
    steps = await plane.read_all_tenants(lambda session: service.read_platform(session, window))
    own = await plane.read(tenant_id, lambda session: service.read_tenant(session, window))
    for step, figures in zip(steps, own, strict=True):
        step.figures = figures
    view = OverviewView(
        range=range_name,
        step_seconds=window.range.step_seconds,
        times=[moment_of(at) for at in window.beginnings],
        series=_series(window, steps),
        now=_tenants_now(await runtime.memories.all(), tenant_id),
        objectives=_objectives(steps),
    )
    return json_response(view)


@router.get("/admin/overview")
@answers(PlatformOverviewView)
async def get_platform_overview(
    runtime: CurrentRuntime, operator: Operator, range_name: Range = "1h"
) -> Response:
    """All figures over time, across all servers, and each tenant's share."""
    await runtime.overview.freshen()
    window, plane = Window(RANGES[range_name], time.time()), runtime.control_plane
    steps = await plane.read_all_tenants(lambda session: service.read_platform(session, window))
    tokens = await plane.read_all_tenants(
        lambda session: service.read_tokens(session, window, MAX_TENANTS)
    )
    view = PlatformOverviewView(
        range=range_name,
        step_seconds=window.range.step_seconds,
        times=[moment_of(at) for at in window.beginnings],
        series=_series(window, steps),
        now=_platform_now(await runtime.memories.all()),
        objectives=_objectives(steps),
        tenants=_loads(window, tokens),
    )
    return json_response(view)


def _series(window: Window, steps: Sequence[Step]) -> OverviewSeries:
    seconds = [window.covered_seconds(at) for at in window.beginnings]

    def levels(value: Callable[[FigureSums], float]) -> Series:
        """By second; null where no server was."""
        return [
            value(step.figures) / each if step.kv_capacity_seconds else None
            for step, each in zip(steps, seconds, strict=True)
        ]

    def percentiles(name: str, fraction: float) -> Series:
        return [percentile(getattr(step.figures, name), fraction) for step in steps]

    return OverviewSeries(
        requests_per_second=levels(lambda figures: figures.num_requests),
        errors_per_second=levels(lambda figures: figures.num_errors),
        output_tokens_per_second=levels(lambda figures: figures.output_tokens),
        prompt_tokens_per_second=levels(lambda figures: figures.prompt_tokens),
        ttft_p50_ms=percentiles("first_token_counts", 0.5),
        ttft_p95_ms=percentiles("first_token_counts", 0.95),
        ttft_p99_ms=percentiles("first_token_counts", 0.99),
        itl_p50_ms=percentiles("token_gap_counts", 0.5),
        itl_p95_ms=percentiles("token_gap_counts", 0.95),
        itl_p99_ms=percentiles("token_gap_counts", 0.99),
        running=levels(lambda figures: figures.running_seconds),
        waiting=levels(lambda figures: figures.waiting_seconds),
        kv_used_fraction=[
            step.figures.kv_block_seconds / step.kv_capacity_seconds
            if step.kv_capacity_seconds
            else None
            for step in steps
        ],
        adapter_device_bytes=levels(lambda figures: figures.adapter_byte_seconds),
        cold_loads_per_second=levels(lambda figures: figures.num_cold_loads),
        attained_share=[_share(step.figures.num_met, step.figures.num_judged) for step in steps],
        goodput_per_second=levels(lambda figures: figures.num_met),
    )


def _share(num_met: int, num_judged: int) -> float | None:
    return num_met / num_judged if num_judged else None


def _objectives(steps: Sequence[Step]) -> list[ObjectiveView]:
    counts = sum((step.figures.objective_counts for step in steps), Counter[str]())
    found = []
    for set_by in ("request", "tenant", "server"):
        of_result = {result: counts[f"{set_by}/{result}"] for result in RESULTS}
        if num_judged := sum(of_result.values()):
            share = of_result[MET] / num_judged
            found.append(ObjectiveView(set_by, **of_result, attained_share=share))
    return found


def _loads(window: Window, tokens: Sequence[TenantTokens]) -> list[TenantLoadView]:
    total = sum(each.total for each in tokens)
    weights = sum(each.weight for each in tokens)
    seconds = [window.covered_seconds(at) for at in window.beginnings]
    return [
        TenantLoadView(
            tenant=each.slug,
            weight=each.weight,
            share=each.total / total,
            fair_share=each.weight / weights,
            attained_share=_share(each.num_met, each.num_judged),
            output_tokens_per_second=[
                count / covered for count, covered in zip(each.by_step, seconds, strict=True)
            ],
        )
        for each in tokens[:MAX_TENANTS]
    ]


def _platform_now(seen: Sequence[SeenMap]) -> OverviewNow:
    engines = [each.content.engine for each in seen]
    num_blocks = sum(engine.kv.num_blocks for engine in engines)
    arena_bytes = sum(each.content.arena_bytes for each in seen)
    return OverviewNow(
        running=sum(line.num_running for engine in engines for line in engine.lines),
        waiting=sum(line.num_waiting for engine in engines for line in engine.lines),
        kv_used_fraction=sum(engine.kv.num_used for engine in engines) / max(num_blocks, 1),
        adapter_device_bytes=arena_bytes - sum(engine.free_bytes for engine in engines),
        arena_bytes=arena_bytes,
        num_servers=len(seen),
    )


def _tenants_now(seen: Sequence[SeenMap], tenant_id: str) -> OverviewNow:
    engines = [each.content.engine for each in seen]
    own = [line for engine in engines for line in engine.lines if line.tenant_id == tenant_id]
    num_blocks = sum(engine.kv.num_blocks for engine in engines)
    return OverviewNow(
        running=sum(line.num_running for line in own),
        waiting=sum(line.num_waiting for line in own),
        kv_used_fraction=sum(line.num_kv_blocks for line in own) / max(num_blocks, 1),
        adapter_device_bytes=sum(device_bytes(engine).get(tenant_id, 0) for engine in engines),
        arena_bytes=None,
        num_servers=None,
    )
