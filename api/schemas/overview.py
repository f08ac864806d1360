"""Response schemas of the overview's time series."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from ..contract.answer_model import AnswerModel

Series = Sequence[float | None]
"""One number for each of `times`; null where nothing was measured."""


@dataclass(frozen=True, slots=True)
class OverviewSeries(AnswerModel):
    """One value per time; null: nothing was measured."""

    requests_per_second: Series
    errors_per_second: Series
    """Requests that failed with an error."""
    output_tokens_per_second: Series
    prompt_tokens_per_second: Series
    ttft_p50_ms: Series
    """From a request's arrival to its first token."""
    ttft_p95_ms: Series
    ttft_p99_ms: Series
    itl_p50_ms: Series
    """Between two events with tokens of one sequence."""
    itl_p95_ms: Series
    itl_p99_ms: Series
    running: Series
    """Sequences in the batch."""
    waiting: Series
    kv_used_fraction: Series
    """Share of the KV blocks in use by requests."""
    adapter_device_bytes: Series
    cold_loads_per_second: Series
    """Requests that waited for their adapter's weights."""
    attained_share: Series
    """Share of the sequences with a service level objective that met it."""
    goodput_per_second: Series
    """Sequences that met their service level objective."""


@dataclass(frozen=True, slots=True)
class ObjectiveView(AnswerModel):
    """How the service level objectives of one origin were attained in this range. Requests count
    when they have ended."""

    set_by: str
    """Who set the targets: `request`, `tenant` or `server`."""
    met: int
    ttft: int
    """Missed the target for the first token."""
    itl: int
    """Missed the target for the mean time between tokens."""
    refused: int
    """The server was full."""
    failed: int
    """Failed by an error of the server."""
    attained_share: float


@dataclass(frozen=True, slots=True)
class OverviewNow(AnswerModel):
    """The newest figures, across all live servers."""

    running: int
    waiting: int
    kv_used_fraction: float
    adapter_device_bytes: int
    arena_bytes: int | None
    """Null for a tenant."""
    num_servers: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewView(AnswerModel):
    """A tenant's usage in equal time steps; the last step is not over."""

    range: str
    step_seconds: int
    times: Annotated[Sequence[datetime], Field(description="When each step began.")]
    series: OverviewSeries
    now: OverviewNow
    objectives: Sequence[ObjectiveView]
    """Of each origin with requests in this range."""


@dataclass(frozen=True, slots=True)
class TenantLoadView(AnswerModel):
    """One tenant's share of the generated tokens."""

    tenant: str
    weight: float
    share: float
    """Share of the output tokens in this range."""
    fair_share: float
    """Its weight's share among the tenants with usage."""
    attained_share: float | None
    """Share of the sequences with a service level objective that met it; null: there were none."""
    output_tokens_per_second: Series


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformOverviewView(OverviewView):
    """The usage of all tenants."""

    tenants: Sequence[TenantLoadView]
    """Ordered by generated tokens, most first."""


RangeName = Literal["15m", "1h", "6h", "24h", "7d"]
