"""Watches canaries with limits: sums their requests, and ends those that exceed a limit.

Every server adds its sums to the database, and compares what it has added to. So a canary is ended
by the first server that sees the excess, and servers without its requests ask nothing.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from functools import partial

import structlog

from ...platform.adapters import canary_counts, service
from ...platform.adapters.canary_rule import Comparison, compare
from ...platform.adapters.canary_sums import Arm, ArmSums, Observation, Split
from ...platform.audit.event import BY_SYSTEM, Changed, Event
from ...platform.errors import PlatformError
from ...platform.sessions import TenantSession
from ..contract.error_codes import ERROR_CODES
from ..control_plane.control_plane import ControlPlane
from ..control_plane.periodic import Periodic
from .metrics import Metrics
from .request_measures import RequestMeasures

log = structlog.get_logger(__name__)

INTERVAL_SECONDS = 5.0
CODES_OF_SERVERS = frozenset(
    {
        *("database_unavailable", "engine_unavailable", "overloaded", "shutting_down"),
        *("too_many_connections", "store_unavailable", "store_denied"),
    }
)
"""Errors of the whole server, which say nothing about a version."""
CODES_OF_VERSIONS = frozenset({"adapter_quarantined", "adapter_too_large", "numerical_error"})
"""What a version does, though the status is one of callers' mistakes."""


class CanaryWatch:
    """One per server."""

    def __init__(self, control_plane: ControlPlane, metrics: Metrics) -> None:
        self._control_plane = control_plane
        self._metrics = metrics
        self._sums: defaultdict[Arm, ArmSums] = defaultdict(ArmSums)
        self._flushing = asyncio.Lock()
        self._flushes = Periodic(
            self.flush, seconds=INTERVAL_SECONDS, log=log, failed="canaries_not_compared"
        )

    def start(self) -> None:
        self._flushes.start()

    async def close(self) -> None:
        """Write the pending sums."""
        await self._flushes.close()
        await self.flush()

    def add(self, code: str, measures: RequestMeasures) -> None:
        """Count a request that has ended; `code` is that of its error, empty if there is none."""
        if measures.arm is None:
            return
        seen = observe(code, measures)
        if seen is not None:
            self._sums[measures.arm].add(seen)

    def add_score(self, split: Split, score: float) -> None:
        """Count a judge's comparison: 1 if the canary is preferred, 0 if the other version."""
        self._sums[Arm(split, is_canary=True)].add_score(score)

    async def flush(self) -> None:
        """Write the pending sums, and end the canaries that exceed a limit. Sums that cannot be
        written are dropped."""
        async with self._flushing:
            pending, self._sums = self._sums, defaultdict(ArmSums)
            for split in {arm.split for arm in pending}:
                arms = {arm: sums for arm, sums in pending.items() if arm.split == split}
                try:
                    await self._judge(split, arms)
                except PlatformError as exc:
                    log.warning("canary_not_compared", alias=split.alias, error=str(exc))
                except Exception:  # a defect at one alias must not stop the others
                    log.exception("canary_not_compared", alias=split.alias)

    async def _judge(self, split: Split, arms: dict[Arm, ArmSums]) -> None:
        def add(session: TenantSession) -> Comparison | None:
            limits = service.find_limits(session, split)
            if limits is None:
                return None  # the alias has changed since
            canary_counts.add(session, arms)
            compared = compare(*canary_counts.read(session, split), limits)
            return next((each for each in compared if each.is_exceeded), None)

        exceeded = await self._control_plane.write(split.tenant_id, add)
        if exceeded is not None:
            await self._end(split, exceeded)

    async def _end(self, split: Split, exceeded: Comparison) -> None:
        change = partial(_end, split=split, reason=exceeded.describe())
        if await self._control_plane.change(split.tenant_id, BY_SYSTEM, change):
            self._metrics.canary_rollbacks.labels(exceeded.limit).inc()
            log.warning(
                "canary_rolled_back",
                tenant_id=split.tenant_id,
                adapter=split.adapter_name,
                alias=split.alias,
                limit=exceeded.limit,
            )


def observe(code: str, measures: RequestMeasures) -> Observation | None:
    """What a request says about its version; None: nothing.

    The caller's own errors, disconnections and errors of the whole server say nothing.
    """
    if code:
        return Observation(is_error=True) if is_of_version(code) else None
    return Observation(
        is_refusal=measures.is_refusal,
        num_tokens=measures.completion_tokens or 0,
        token_seconds=measures.token_seconds,
    )


def is_of_version(code: str) -> bool:
    """An error of this code is the version's."""
    if code in CODES_OF_VERSIONS:
        return True
    known = ERROR_CODES.get(code)
    return known is not None and known.status >= 500 and code not in CODES_OF_SERVERS


def _end(session: TenantSession, *, split: Split, reason: str) -> Changed[bool]:
    row = service.end_canary(session, split, reason)
    if row is None:
        return Changed(False, None)
    details = {"version": row.version.number, "reason": reason}
    return Changed(True, Event("alias.rollback", f"{split.adapter_name}@{split.alias}", details))
