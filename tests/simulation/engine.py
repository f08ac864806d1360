"""`EngineCore`'s loop around the real scheduler and residency, without a model.

What the core decides itself (who ends when, and with which code) is done here in the same order;
everything below it is the code that serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.residency import Residency
from loraplex.engine.batch import ScheduledBatch, ScheduledSequence
from loraplex.engine.drains import Drains
from loraplex.engine.errors import AdapterDeleted, EngineError, NumericalError, StaleExtent
from loraplex.engine.kv_blocks import KvBlocks
from loraplex.engine.messages import EvictionReceipt, GenerationRequest
from loraplex.engine.prefix_cache import CacheNamespace
from loraplex.engine.request import Request
from loraplex.engine.scheduler import Schedule, Scheduler
from loraplex.engine.step_costs import StepCosts
from support.residency import FakeArena, FakeBlock, FakeHost, ManualLoaders

from .contents import Contents
from .device import FakeDevice
from .scenario import Scenario

RUNTIME_ID = "runtime"
VOCABULARY = 40
STOP_TOKEN = 0
REAP_INTERVAL_SECONDS = 5.0


class Faults(NamedTuple):
    """What goes wrong in one step's forward."""

    nan: frozenset[str] = frozenset()
    """Requests whose rows are not finite."""
    raises: bool = False
    """The batch as a whole cannot run; its sequences can, one by one."""
    poison: frozenset[str] = frozenset()
    """Requests that cannot run alone either."""


NO_FAULTS = Faults()


class SimulatedEngine:
    """One life of an engine: a restart makes a new one."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        clock: Callable[[], float],
        want: Callable[[AdapterKey], None],
        on_batch: Callable[[ScheduledBatch], None],
        on_end: Callable[[Request, str], None],
    ) -> None:
        self.device = FakeDevice(scenario.groups, scenario.limits.block_size)
        self.arena = FakeArena(scenario.arena_cells)
        self.host = FakeHost(scenario.host_cells)
        self.loaders = ManualLoaders()
        self.residency: Residency[FakeBlock] = Residency(
            arena=self.arena, host=self.host, loaders=self.loaders, want=want, clock=clock
        )
        self.kv = KvBlocks(
            scenario.groups,
            scenario.limits.block_size,
            prefix_secret=b"secret" if scenario.prefix_caching else None,
            num_swap_slots=scenario.num_swap_slots,
        )
        self.costs = StepCosts()
        self.scheduler = Scheduler(
            scenario.limits, kv=self.kv, residency=self.residency, costs=self.costs, clock=clock
        )
        self.drains = Drains(
            scheduler=self.scheduler,
            residency=self.residency,
            kv=self.kv,
            clock=clock,
            abort=lambda request, error: self._finish(request, error.code),
        )
        self.contents: dict[str, Contents] = {}
        self.evicted: list[tuple[AdapterKey, EvictionReceipt]] = []
        """Deletions that ended in the last step."""
        self.schedule = Schedule(None, [], [])
        """What the last step decided."""
        self._next_reap_time = clock() + REAP_INTERVAL_SECONDS
        self.num_reaps = 0
        self._scenario = scenario
        self._on_batch = on_batch
        self._clock = clock
        self._on_end = on_end

    # --- messages -------------------------------------------------------------------------------

    def submit(self, submitted: GenerationRequest) -> Request:
        """Raises what `Scheduler.add` raises, and AdapterDeleted."""
        adapter = submitted.adapter
        if adapter in self.drains:
            raise AdapterDeleted
        request = Request(
            submitted=submitted,
            namespace=CacheNamespace(
                submitted.tenant_id, RUNTIME_ID, adapter, submitted.cache_namespace
            ),
            seed=submitted.sampling.seed or 0,
            arrival_time=self._clock(),
            adapter_tier=self.residency.tier(adapter) if adapter else None,
        )
        self.scheduler.add(request)
        self.contents[request.request_id] = Contents(request.namespace)
        return request

    def abort(self, request_id: str) -> bool:
        """Ids that are unknown or have ended are ignored; True if this one had not."""
        request = self.scheduler.get(request_id)
        if request is None:
            return False
        self._finish(request, "aborted")
        return True

    def evict(self, key: AdapterKey, drain_seconds: float = 0.0) -> None:
        self.drains.begin(key, drain_seconds)

    # --- one step -------------------------------------------------------------------------------

    def step(self, faults: Faults) -> ScheduledBatch | None:
        """One iteration; returns the batch that ran. Its time is not taken yet: see `observe`."""
        self.residency.poll()
        self._reap_if_due()
        self.evicted = self.drains.poll()
        self.schedule = self.scheduler.schedule()
        for request, error in self.schedule.failed:
            self._announce_end(request, error.code)
        batch = self.schedule.batch
        if batch:
            self._on_batch(batch)
            self._run(batch, faults)
        return batch

    def _run(self, batch: ScheduledBatch, faults: Faults) -> None:
        self.device.execute(batch.operations)
        sequences = self._drop_stale(batch.sequences)
        ids = {sequence.request.request_id for sequence in sequences}
        if not faults.raises and not ids & faults.poison:
            self._forward(sequences, faults)
            return
        for sequence in sequences:
            if sequence.request.request_id in faults.poison:
                self._finish(sequence.request, EngineError.code)
            else:
                self._forward((sequence,), faults)

    def _forward(self, sequences: Sequence[ScheduledSequence], faults: Faults) -> None:
        live = [request.kv.tables for request in self.scheduler.requests()]
        self.device.run(sequences, self.contents, live, faults.nan)
        drawing = []
        for sequence in self._drop_stale(sequences):
            request = sequence.request
            if request.request_id in faults.nan:
                self._finish(request, NumericalError.code)
                continue
            if sequence.samples:
                drawing.append(request)
            self.scheduler.advance(sequence)
        for request in drawing:
            self._draw(request)

    def _draw(self, request: Request) -> None:
        """The next token follows from the content of the last position, so from all before it."""
        values = self.contents[request.request_id].values
        token = (values[len(request.token_ids) - 1] // 4096 + request.seed) % VOCABULARY
        self.scheduler.append(request, [token])
        params = request.submitted.sampling
        if token == STOP_TOKEN and not params.ignore_eos:
            self._finish(request, "stop")
        elif request.num_generated_tokens >= params.max_tokens:
            self._finish(request, "length")

    def _drop_stale(self, sequences: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
        current = []
        for sequence in sequences:
            if self.is_current(sequence.request):
                current.append(sequence)
            else:
                self._finish(sequence.request, StaleExtent.code)
        return current

    def is_current(self, request: Request) -> bool:
        """Whether the row that the lease names holds the request's adapter."""
        adapter, lease = request.submitted.adapter, request.lease
        if adapter is None or lease is None:
            return adapter is None
        return self.arena.identity(lease.row) == (adapter, lease.generation)

    def _finish(self, request: Request, reason: str) -> None:
        self.scheduler.finish(request)
        self._announce_end(request, reason)

    def _announce_end(self, request: Request, reason: str) -> None:
        self.contents.pop(request.request_id, None)
        self._on_end(request, reason)
        self.drains.note_end(request, is_deleted=reason == AdapterDeleted.code)

    def _reap_if_due(self) -> None:
        if self._clock() < self._next_reap_time:
            return
        self._next_reap_time = self._clock() + REAP_INTERVAL_SECONDS
        self.num_reaps += 1
        self.residency.reap(
            request.request_id for request in self.scheduler.requests() if request.lease
        )
