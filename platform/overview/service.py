"""Writes samples and reads them as time series.

Each server adds to its own rows in time steps of three lengths at once, so nothing is aggregated
later. Rows of shorter time steps are deleted sooner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import delete, func, select

from ..locked_rows import lock_or_add
from ..sessions import PlatformSession, TenantSession
from ..tenants.models import Tenant
from .figures import COUNTS, SUMS, FigureSums
from .latencies import percentile
from .models import AdapterUse, ServerSample, TenantSample
from .recent_requests import count_requests

HOUR = 3600
KEPT_SECONDS: Mapping[int, int] = {15: HOUR, 60: 12 * HOUR, 900: 8 * 24 * HOUR}
"""By the length of a time step: how long its rows are kept."""
MAX_LATENCIES = 1000
"""Per adapter: when this many are counted, all counts are halved, so the latest weigh most."""
_P95 = 0.95


class Range(NamedTuple):
    """The length of a series and of its time steps."""

    seconds: int
    step_seconds: int
    source_seconds: int
    """The length of the rows' steps that it is made of."""


RANGES: Mapping[str, Range] = {
    "15m": Range(15 * 60, 15, 15),
    "1h": Range(HOUR, 60, 60),
    "6h": Range(6 * HOUR, 180, 60),
    "24h": Range(24 * HOUR, 900, 900),
    "7d": Range(7 * 24 * HOUR, 5400, 900),
}


@dataclass(frozen=True, slots=True)
class Window:
    """The steps of a range that ends now."""

    range: Range
    end: float
    """Seconds since 1970."""

    @property
    def beginnings(self) -> list[int]:
        """When each step began; the last one has not ended."""
        step = self.range.step_seconds
        last = int(self.end) // step * step
        return list(range(last - self.range.seconds + step, last + step, step))

    def covered_seconds(self, beginning: int) -> float:
        """The elapsed part of the time step."""
        return max(min(self.range.step_seconds, self.end - beginning), 1.0)


@dataclass(slots=True)
class UseSums:
    """The use of one adapter since the last write."""

    last_used_at: datetime
    latency_counts: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Gathered:
    """The figures collected on a server."""

    server: FigureSums = field(default_factory=FigureSums)
    kv_capacity_seconds: float = 0.0
    tenants: dict[str, FigureSums] = field(default_factory=dict)
    """By tenant id."""
    uses: dict[tuple[str, str], UseSums] = field(default_factory=dict)
    """By tenant id and adapter name."""


def add(session: PlatformSession, server_id: str, moment: float, gathered: Gathered) -> None:
    """Add the figures collected at this time (seconds since 1970) to the server's rows."""
    places = [(step, int(moment) // step * step) for step in KEPT_SECONDS]
    for step, at in places:
        row = session.get(ServerSample, (server_id, step, at))
        if row is None:
            row = _begin(ServerSample(server_id=server_id, step_seconds=step, at=at))
            row.kv_capacity_seconds = 0.0
            session.add(row)
        row.kv_capacity_seconds += gathered.kv_capacity_seconds
        _add(row, gathered.server)
    known = _known_rows(session, server_id, places, gathered.tenants)
    for tenant_id, figures in gathered.tenants.items():
        for step, at in places:
            sample = known.get((tenant_id, step))
            if sample is None:
                sample = TenantSample(
                    tenant_id=tenant_id, server_id=server_id, step_seconds=step, at=at
                )
                session.add(_begin(sample))
            _add(sample, figures)
    for key in sorted(gathered.uses):  # in one order: other servers add to the same rows
        _add_use(session, *key, gathered.uses[key])


def purge(session: PlatformSession, now: float) -> int:
    """Delete expired rows; returns how many."""
    num_dropped = 0
    for step, seconds in KEPT_SECONDS.items():
        for table in (ServerSample, TenantSample):
            dropped = session.execute(
                delete(table)
                .where(table.step_seconds == step, table.at < now - seconds - step)
                .returning(table.at)
            )
            num_dropped += len(dropped.all())
    return num_dropped


# --- reading --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Step:
    """The figures of one time step of a series."""

    figures: FigureSums = field(default_factory=FigureSums)
    kv_capacity_seconds: float = 0.0
    """0: no server was running."""


def read_platform(session: PlatformSession, window: Window) -> list[Step]:
    """The figures of all tenants per time step, over all servers."""
    steps = {at: Step() for at in window.beginnings}
    for row in _rows(session, ServerSample, window):
        step = steps[_step_of(row.at, window)]
        step.figures.add(row)
        step.kv_capacity_seconds += row.kv_capacity_seconds
    return list(steps.values())


def read_tenant(session: TenantSession, window: Window) -> list[FigureSums]:
    """The tenant's own figures of each step, of all servers."""
    steps = {at: FigureSums() for at in window.beginnings}
    for row in _rows(session, TenantSample, window):
        steps[_step_of(row.at, window)].add(row)
    return list(steps.values())


class TenantTokens(NamedTuple):
    """The tokens generated for one tenant."""

    slug: str
    weight: float
    total: int
    by_step: list[int]
    num_judged: int
    """Sequences with a service level objective; `num_met` of them met it."""
    num_met: int


def read_tokens(session: PlatformSession, window: Window, limit: int) -> list[TenantTokens]:
    """The output tokens of each tenant that generated any, most first; `limit` of them by step."""
    beginnings = window.beginnings
    totals = session.execute(
        select(
            *(Tenant.id, Tenant.slug, Tenant.weight, func.sum(TenantSample.output_tokens)),
            *(func.sum(TenantSample.num_judged), func.sum(TenantSample.num_met)),
        )
        .join(Tenant, Tenant.id == TenantSample.tenant_id)
        .where(*_within(TenantSample, window))
        .group_by(Tenant.id, Tenant.slug, Tenant.weight)
        .having(func.sum(TenantSample.output_tokens) > 0)
        .order_by(func.sum(TenantSample.output_tokens).desc(), Tenant.slug)
    ).all()
    found = {
        row[0]: TenantTokens(
            row[1], row[2], int(row[3]), [0] * len(beginnings), int(row[4]), int(row[5])
        )
        for row in totals
    }
    shown = [row[0] for row in totals[:limit]]
    rows = session.execute(
        select(TenantSample.tenant_id, TenantSample.at, func.sum(TenantSample.output_tokens))
        .where(*_within(TenantSample, window), TenantSample.tenant_id.in_(shown))
        .group_by(TenantSample.tenant_id, TenantSample.at)
    )
    for tenant_id, at, tokens in rows:
        position = (_step_of(at, window) - beginnings[0]) // window.range.step_seconds
        found[tenant_id].by_step[position] += int(tokens)
    return list(found.values())


def _rows(session: PlatformSession | TenantSession, table: Any, window: Window) -> Iterable[Any]:
    return session.scalars(select(table).where(*_within(table, window)))


def _within(table: Any, window: Window) -> Sequence[Any]:
    beginnings = window.beginnings
    return (
        table.step_seconds == window.range.source_seconds,
        table.at >= beginnings[0],
        table.at < beginnings[-1] + window.range.step_seconds,
    )


def _step_of(at: int, window: Window) -> int:
    return at // window.range.step_seconds * window.range.step_seconds


# --- writing --------------------------------------------------------------------------------------


def _known_rows(
    session: PlatformSession,
    server_id: str,
    places: Sequence[tuple[int, int]],
    tenants: Iterable[str],
) -> dict[tuple[str, int], TenantSample]:
    """The existing rows of these tenants for the server, by tenant and time step."""
    found: dict[tuple[str, int], TenantSample] = {}
    wanted = list(tenants)
    for step, at in places:
        query = select(TenantSample).where(
            TenantSample.tenant_id.in_(wanted),
            TenantSample.server_id == server_id,
            TenantSample.step_seconds == step,
            TenantSample.at == at,
        )
        found |= {(row.tenant_id, step): row for row in session.scalars(query)}
    return found


def _begin(row: Any) -> Any:
    for name in SUMS:
        setattr(row, name, 0)
    for name in COUNTS:
        setattr(row, name, {})
    return row


def _add(row: Any, figures: FigureSums) -> None:
    for name in SUMS:
        setattr(row, name, getattr(row, name) + getattr(figures, name))
    for name in COUNTS:  # a new object each time, because changes in place are not detected
        setattr(row, name, _merged(getattr(row, name) or {}, getattr(figures, name)))


def _merged(counts: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    return {bucket: counts.get(bucket, 0) + more.get(bucket, 0) for bucket in {**counts, **more}}


def _add_use(session: PlatformSession, tenant_id: str, name: str, use: UseSums) -> None:
    unused = AdapterUse(tenant_id=tenant_id, adapter_name=name, latency_counts={}, p95_ms=0.0)
    unused.last_used_at = use.last_used_at
    row = lock_or_add(session, unused)
    counts = _merged(row.latency_counts, use.latency_counts)
    while sum(counts.values()) > MAX_LATENCIES:
        counts = {bucket: half for bucket, count in counts.items() if (half := count // 2)}
    row.last_used_at = max(row.last_used_at, use.last_used_at)
    row.latency_counts, row.p95_ms = counts, percentile(counts, _P95) or 0.0
    row.num_requests = count_requests(session, tenant_id, name)


def moment_of(seconds: int) -> datetime:
    """Seconds since 1970 as a moment."""
    return datetime.fromtimestamp(seconds, UTC)
