"""Draws the requests of which samples are kept, and writes them: collected in memory, stored once a
second.

A request never waits for it. What cannot be written is dropped and counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from ...platform.adapters.registry import AdapterRef
from ...platform.adapters.sampling import is_sampled
from ...platform.errors import PlatformError
from ...platform.samples import service
from ...platform.samples.sample_seal import SampleSeal
from ...platform.samples.service import NewSample
from ..control_plane.control_plane import ControlPlane
from ..control_plane.periodic import Periodic
from ..telemetry.metrics import Metrics
from .content import Content
from .open_sample import OpenSample

log = structlog.get_logger(__name__)

WRITE_SECONDS = 1.0
MAX_SAMPLE_BYTES = 256 << 10
"""Of the content of one sample; larger ones are not kept."""
MAX_PENDING_BYTES = 64 << 20
"""Of the samples that wait to be written."""
MAX_TENANT_PENDING_BYTES = 8 << 20
"""Of those of one tenant."""
MAX_BATCH = 50
"""Samples that one transaction writes."""
_ROW_BYTES = 1024
"""What a sample takes in memory beside its content."""


class SampleLog:
    """One per server."""

    def __init__(
        self, control_plane: ControlPlane, metrics: Metrics, seal: SampleSeal, *, max_days: int
    ) -> None:
        """`max_days`: how long samples may be kept; 0: none are."""
        self.max_days = max_days
        self.seal = seal
        self._control_plane = control_plane
        self._metrics = metrics
        self._pending: dict[str, deque[NewSample]] = {}
        """By tenant."""
        self._pending_bytes: Counter[str] = Counter()
        """By tenant."""
        self._writing = asyncio.Lock()
        self._writes = Periodic(
            self.flush, seconds=WRITE_SECONDS, log=log, failed="samples_not_written"
        )

    def start(self) -> None:
        self._writes.start()

    async def close(self) -> None:
        """Write the pending samples."""
        await self._writes.close()
        await self.flush()

    def open(
        self, request_id: str, adapter: AdapterRef, make_content: Callable[[], Content]
    ) -> OpenSample | None:
        """The sample of a request, if it was drawn."""
        is_drawn = self.max_days > 0 and is_sampled(
            adapter.sampled_percent, adapter_id=adapter.adapter_id, request_id=request_id
        )
        if not is_drawn:
            return None
        keep = partial(self._add, adapter.key.tenant_id)
        return OpenSample(request_id, adapter, make_content(), keep)

    async def flush(self) -> None:
        """Write the pending samples, and wait for those being written: for readers that must see
        those of requests that have just ended."""
        async with self._writing:
            for tenant_id in list(self._pending):
                while await self._write_batch(tenant_id):
                    pass

    def _add(self, tenant_id: str, sample: NewSample) -> None:
        size = _size(sample)
        is_full = (
            self._pending_bytes.total() + size > MAX_PENDING_BYTES
            or self._pending_bytes[tenant_id] + size > MAX_TENANT_PENDING_BYTES
        )
        if is_full or len(sample.content) > MAX_SAMPLE_BYTES:
            self._count(dropped=1)
            return
        self._pending.setdefault(tenant_id, deque()).append(sample)
        self._pending_bytes[tenant_id] += size

    async def _write_batch(self, tenant_id: str) -> bool:
        """False if there is nothing more to write. What cannot be written is dropped."""
        pending = self._pending.get(tenant_id)
        if not pending:
            self._pending.pop(tenant_id, None)
            self._pending_bytes.pop(tenant_id, None)
            return False
        batch = [pending.popleft() for _ in range(min(MAX_BATCH, len(pending)))]
        self._pending_bytes[tenant_id] -= sum(map(_size, batch))
        try:
            await self._write(tenant_id, batch)
        except Exception as exc:  # without the traceback, whose values may be the tenant's text
            self._count(dropped=len(batch))
            reason = str(exc) if isinstance(exc, PlatformError) else type(exc).__name__
            log.warning("samples_not_written", num_samples=len(batch), reason=reason)
        return True

    async def _write(self, tenant_id: str, batch: Sequence[NewSample]) -> None:
        added = await self._control_plane.write(
            tenant_id,
            lambda session: service.add_all(session, batch, self.seal, max_days=self.max_days),
        )
        self._count(kept=added.num_kept, dropped=added.num_dropped)

    def _count(self, *, kept: int = 0, dropped: int = 0) -> None:
        self._metrics.samples.labels("kept").inc(kept)
        self._metrics.samples.labels("dropped").inc(dropped)


def _size(sample: NewSample) -> int:
    return len(sample.content) + _ROW_BYTES
