"""Writes the request log: collected in memory, stored once a second.

The log is for diagnosis, not for accounting. A request never waits for it. If more requests end
than can be written, the rest is dropped and counted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import datetime
from functools import partial

import structlog

from ...platform.base import utc_now
from ...platform.errors import PlatformError
from ...platform.requests import service
from ...platform.requests.models import MODEL_LENGTH, ROUTE_LENGTH, LogRow
from ..control_plane.control_plane import ControlPlane
from ..control_plane.periodic import Periodic
from .metrics import Metrics
from .request_measures import RequestMeasures

log = structlog.get_logger(__name__)

WRITE_SECONDS = 1.0
MAX_PENDING = 10_000
MAX_BATCH = 500
GENERATING_ROUTES = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
        *("/v1/embeddings", "/v1/classify", "/classify", "/v1/score", "/score"),
        *("/v1/rerank", "/v2/rerank", "/rerank"),
    }
)


class RequestLog:
    """One per server."""

    def __init__(self, control_plane: ControlPlane, metrics: Metrics) -> None:
        self._control_plane = control_plane
        self._metrics = metrics
        self._pending: deque[LogRow] = deque()
        self._writing = asyncio.Lock()
        self._writes = Periodic(
            self._write, seconds=WRITE_SECONDS, log=log, failed="request_log_not_written"
        )

    def start(self) -> None:
        self._writes.start()

    async def close(self) -> None:
        """Write the pending entries."""
        await self._writes.close()
        await self._write()

    def add(
        self,
        *,
        request_id: str,
        tenant_id: str,
        key_id: str | None,
        route: str,
        status: int,
        code: str,
        seconds: float,
        measures: RequestMeasures,
        now: datetime | None = None,
    ) -> None:
        """Add a request that has ended; `now` is its end."""
        if route not in GENERATING_ROUTES:
            return
        if len(self._pending) >= MAX_PENDING:
            self._metrics.request_log_dropped.inc()
            return
        self._pending.append(
            {
                "request_id": request_id,
                "tenant_id": tenant_id,
                "created_at": now or utc_now(),
                "key_id": key_id,
                "route": route[:ROUTE_LENGTH],
                "status": status,
                "error_code": code or None,
                "model": _shown(measures.model or measures.asked_model),
                "adapter_name": measures.adapter_name,
                "adapter_version": measures.adapter_version,
                "finish_reason": measures.finish_reason,
                "tier": measures.tier,
                "prompt_tokens": measures.prompt_tokens,
                "cached_tokens": measures.cached_tokens,
                "completion_tokens": measures.completion_tokens,
                "queue_ms": _milliseconds(measures.queue_seconds),
                "adapter_wait_ms": _milliseconds(measures.adapter_wait_seconds),
                "load_ms": measures.load_ms,
                "first_token_ms": _milliseconds(measures.first_token_seconds),
                "total_ms": 1000 * seconds,
            }
        )

    async def flush(self) -> None:
        """Write the pending entries, and wait for those being written: for readers that must see
        requests that have just ended."""
        await self._write()

    async def _write(self) -> None:
        async with self._writing:
            while self._pending and await self._write_batch():
                pass

    async def _write_batch(self) -> bool:
        """False if the database is unavailable. Entries that cannot be written are dropped."""
        batch = [self._pending.popleft() for _ in range(min(MAX_BATCH, len(self._pending)))]
        try:
            await self._control_plane.write_all_tenants(partial(service.add, entries=batch))
        except PlatformError as exc:
            self._metrics.request_log_dropped.inc(len(batch))
            log.warning("request_log_not_written", num_entries=len(batch), reason=str(exc))
            return False
        except Exception:  # a defect here must not stop later writes
            self._metrics.request_log_dropped.inc(len(batch))
            log.exception("request_log_not_written", num_entries=len(batch))
        return True


def _shown(name: str | None) -> str | None:
    """An untrusted name, truncated, with unprintable characters replaced."""
    cut = name and name[:MODEL_LENGTH]
    if cut is None or cut.isprintable():
        return cut
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in cut)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
