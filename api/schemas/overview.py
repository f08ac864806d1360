"""What is answered about the last minutes, hours and days."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import msgspec

Series = Sequence[float | None]
"""One number for each of `times`; null where nothing was measured."""


class OverviewSeries(msgspec.Struct, frozen=True):
    """Each has as many entries as there are times; null: nothing was measured."""

    requests_per_second: Series
    errors_per_second: Series
    """Requests that were answered with an error."""
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
    """Part of the KV blocks that requests hold."""
    adapter_device_bytes: Series
    cold_loads_per_second: Series
    """Requests that waited for their adapter's weights."""


class OverviewNow(msgspec.Struct, frozen=True):
    """The newest figures, of all live servers together."""

    running: int
    waiting: int
    kv_used_fraction: float
    adapter_device_bytes: int
    arena_bytes: int | None
    """Null for a tenant: it tells of others."""
    num_servers: int | None


class OverviewView(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant used, in equal steps of time; the last step has not ended."""

    range: str
    step_seconds: int
    times: Sequence[datetime]
    """When each step began."""
    series: OverviewSeries
    now: OverviewNow


class TenantLoadView(msgspec.Struct, frozen=True):
    """One tenant's part in what was generated."""

    tenant: str
    weight: float
    share: float
    """Of the output tokens in this range."""
    fair_share: float
    """What its weight is among those of the tenants that used anything."""
    output_tokens_per_second: Series


class PlatformOverviewView(OverviewView, frozen=True, kw_only=True):
    """What everybody used."""

    tenants: Sequence[TenantLoadView]
    """Those that generated most, first."""


RangeName = Literal["15m", "1h", "6h", "24h", "7d"]
