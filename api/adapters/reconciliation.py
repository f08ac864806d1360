"""Reconciles the engine with the desired state: the pins and prefetches in the database.

The database holds the desired state and the engine the actual state. Nothing else is stored, so a
server start, an engine restart and a new pin are handled alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime

import structlog

from ...adapters.identity import AdapterKey
from ...engine.errors import EngineError
from ...engine.process.engine import Engine
from ...platform.adapters import wishes
from ...platform.adapters.states import WishKind
from ...platform.adapters.wishes import WishedContent
from ...platform.base import utc_now
from ...platform.errors import PlatformError
from ...platform.jobs.service import shared_now
from ...platform.sessions import PlatformSession
from ..control_plane.background_loop import BackgroundLoop
from ..control_plane.control_plane import ControlPlane

log = structlog.get_logger(__name__)

INTERVAL_SECONDS = 5.0
MAX_PAUSE_SECONDS = 60.0


class Reconciliation:
    """Compares the two and corrects the engine, every few seconds and on demand; one per server."""

    def __init__(self, *, engine: Engine, control_plane: ControlPlane) -> None:
        self._engine = engine
        self._control_plane = control_plane
        self._is_due = asyncio.Event()
        self._prefetched: dict[AdapterKey, int] = {}
        """The prefetches requested from the engine, and the engine start of each: a prefetch is
        requested once."""
        self._loop = BackgroundLoop(self._run)

    def start(self) -> None:
        self._loop.start()

    def hasten(self) -> None:
        """A wish was made or withdrawn: reconcile now."""
        self._is_due.set()

    async def close(self) -> None:
        await self._loop.close()

    async def reconcile(self) -> None:
        """Reconcile once. Raises a PlatformError or EngineError; the next round retries."""
        now = utc_now()
        base_id = self._engine.info.base_id

        def read(session: PlatformSession) -> tuple[datetime, Sequence[WishedContent]]:
            as_of = shared_now(session)
            return as_of, wishes.list_live_wishes_of_all_tenants(session, now, base_id=base_id)

        as_of, wished = await self._control_plane.read_all_tenants(read)
        # The latest first: where not all pins find room, the engine keeps those.
        pins = [wish.key for wish in reversed(wished) if wish.kind is WishKind.PIN]
        self._engine.set_pinned(pins, as_of=as_of.timestamp())
        self._prefetch([wish for wish in wished if wish.kind is WishKind.PREFETCH])

    def _prefetch(self, wished: Sequence[WishedContent]) -> None:
        life = self._engine.num_restarts
        self._prefetched = {
            wish.key: self._prefetched[wish.key] for wish in wished if wish.key in self._prefetched
        }
        for wish in wished:
            if self._engine.is_ready and self._prefetched.get(wish.key) != life:
                self._engine.prefetch(wish.key, stay_seconds=_seconds_left(wish))
                self._prefetched[wish.key] = life

    async def _run(self) -> None:
        pause = INTERVAL_SECONDS
        while True:
            self._is_due.clear()
            try:
                await self.reconcile()
                pause = INTERVAL_SECONDS
            except (PlatformError, EngineError) as exc:
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
                log.warning("reconciliation_delayed", error=str(exc), seconds=pause)
            except Exception:  # a defect in one round must not stop the next ones
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
                log.exception("reconciliation_failed", seconds=pause)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._is_due.wait()


def _seconds_left(wish: WishedContent) -> float:
    """How long a prefetched adapter must stay; 0 means the normal eviction order."""
    if wish.expires_at is None:
        return 0.0
    return max(0.0, (wish.expires_at - utc_now()).total_seconds())
