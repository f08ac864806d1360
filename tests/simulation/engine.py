"""The real scheduler, adapter manager and step execution, without a model.

What the engine's core does around them is repeated here in the same order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import AdapterManager
from loraplex.engine.errors import AdapterDeleted, EngineError
from loraplex.engine.execution.execution import Execution
from loraplex.engine.execution.pipeline import Pipeline, StepsInFlight
from loraplex.engine.execution.stage_pipeline import StagePipeline
from loraplex.engine.kv.blocks import KvBlocks
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.memory.host_plan import SharedHostMemory
from loraplex.engine.messages import (
    EvictionReceipt,
    FinishReason,
    GenerationRequest,
    PromptOutput,
    TokensGenerated,
)
from loraplex.engine.request import Request
from loraplex.engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from loraplex.engine.scheduling.drains import Drains
from loraplex.engine.scheduling.scheduler import Schedule, Scheduler
from loraplex.engine.scheduling.step_costs import StepCosts
from loraplex.engine.speculation.remembered_outputs import RememberedOutputs
from support.manager import FakeArena, FakeBlock, FakeHost, ManualLoaders

from .border import open_border, open_host_border
from .contents import STOP_TOKEN, Contents
from .device import FakeDevice
from .disk import FakeDisk
from .draft_tokens import DrawnTokens
from .forward import FakeDraws, FakeForward, Faults, Rows
from .readings import Readings
from .scenario import Scenario

RUNTIME_ID = "runtime"
REAP_INTERVAL_SECONDS = 5.0


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
        disk: FakeDisk | None,
    ) -> None:
        self.device = FakeDevice(
            *(scenario.groups, scenario.limits.block_size, disk),
            has_stages=scenario.num_stages > 1,
        )
        most_bytes = scenario.border.most_adapters if scenario.border else 0
        self.arena = FakeArena(scenario.arena_cells, most_bytes // FakeArena.element_bytes)
        self.host = FakeHost(scenario.host_cells)
        self.loaders = ManualLoaders()
        self.manager: AdapterManager[FakeBlock] = AdapterManager(
            arena=self.arena,
            host=self.host,
            loaders=self.loaders,
            clock=clock,
            num_soon=scenario.limits.max_num_seqs,
        )
        self.kv = KvBlocks(
            scenario.groups,
            scenario.limits.block_size,
            prefix_secret=b"secret" if scenario.prefix_caching else None,
            num_swap_slots=scenario.num_swap_slots,
            tenant_cap=scenario.limits.tenant_cap,
            clock=clock,
        )
        if disk is not None:
            self.kv.use_disk(disk, scenario.num_disk_slots, scenario.limits.kv_block_bytes)
        self.host_border = None
        if shared := scenario.host_memory:
            self.host.reserved = shared.bounds.most_adapters // FakeArena.element_bytes
            self.host.on_grow = partial(self._take_slots, shared)
        self.contents: dict[str, Contents] = {}
        self.draft_tokens = DrawnTokens(scenario, self.contents)
        self.readings = Readings()
        self.costs = StepCosts()
        self.scheduler = Scheduler(
            scenario.limits,
            kv=self.kv,
            manager=self.manager,
            costs=self.costs,
            clock=clock,
            drafts=self.draft_tokens,
        )
        self.border = None
        if scenario.border:
            self.border = open_border(
                scenario.border,
                seed=scenario.seed,
                block_size=scenario.limits.block_size,
                kv=self.kv,
                manager=self.manager,
                scheduler=self.scheduler,
                costs=self.costs,
                clock=clock,
                execute=self.device.launch_operations,
                num_given_back=lambda: self.device.num_given_back,
            )
        if scenario.host_memory:
            self.host_border = open_host_border(
                scenario.host_memory,
                seed=scenario.seed,
                adapter_bytes=self.host.capacity_bytes,
                block_size=scenario.limits.block_size,
                kv=self.kv,
                manager=self.manager,
                costs=self.costs,
                clock=clock,
            )
        self.forward = FakeForward(self.device, self.arena, self.contents, self.scheduler.requests)
        self.execution = Execution(
            runner=self.forward,
            scheduler=self.scheduler,
            speculation=self.draft_tokens,
            read=self.readings.read,
            draw=FakeDraws,
            requests=self,
        )
        self.pipeline = self._open_pipeline(scenario.num_stages)
        self.has_read = False
        """Whether the last iteration read a step that was in flight."""
        self.read_steps: list[Sequence[ScheduledSequence]] = []
        """The steps whose output the last iteration read."""
        self._launched: deque[Sequence[ScheduledSequence]] = deque()
        self.ended: list[Request] = []
        """The requests whose ends the last iteration announces."""
        self.suspects: frozenset[str] = frozenset()
        """Who is suspected if the engine crashes now."""
        self.delivered: Counter[str] = Counter()
        """By request id, the tokens that the caller has."""
        self._announced: Counter[str] = Counter()
        """By request id, the tokens that the step's messages deliver."""
        self.counts: Counter[str] = Counter()
        self.outputs = RememberedOutputs()
        """Of all requests that were not broken off."""
        self.drains = Drains(
            scheduler=self.scheduler,
            manager=self.manager,
            kv=self.kv,
            clock=clock,
            abort=self.fail,
            forget_outputs=lambda key: self.outputs.forget(key, clock()),
        )
        self.executed: ScheduledBatch | None = None
        """What of the last step really ran."""
        self.evicted: list[tuple[AdapterKey, EvictionReceipt]] = []
        """Deletions that ended in the last step."""
        self.schedule = Schedule(None, [], [])
        """What the last step decided."""
        self._next_reap_time = clock() + REAP_INTERVAL_SECONDS
        self.num_reaps = 0
        self._scenario = scenario
        self._want = want
        self._on_batch = on_batch
        self._clock = clock
        self._on_end = on_end

    def _take_slots(self, shared: SharedHostMemory, capacity_bytes: int) -> None:
        """Adapters have what is before `capacity_bytes` in host memory, of which the slots have the
        end."""
        num_left = (shared.bounds.total - capacity_bytes) // shared.slot_bytes
        self.device.lose_places(shared.group, shared.num_slots - num_left)

    def _open_pipeline(self, num_stages: int) -> StepsInFlight[Rows]:
        if num_stages == 1:
            return Pipeline(
                self.execution, self.scheduler, on_launch=self._name, on_read=self._note_read
            )
        return StagePipeline(
            self.execution,
            self.scheduler,
            num_stages=num_stages,
            begin=self.forward.begin,
            on_launch=self._name,
            on_read=self._note_read,
        )

    # --- messages -------------------------------------------------------------------------------

    def submit(self, submitted: GenerationRequest, *, is_held: bool = False) -> Request:
        """Raises what `Scheduler.add` raises, and AdapterDeleted."""
        adapter = submitted.adapter
        if adapter in self.drains:
            raise AdapterDeleted
        request = Request(
            submitted=submitted,
            namespace=CacheNamespace(
                submitted.tenant_id,
                RUNTIME_ID,
                adapter if submitted.adapter_start is not None else None,
                submitted.cache_namespace,
                rotary_start=self._scenario.rotary_contexts.start(submitted.greatest_length),
                adapter_start=submitted.adapter_start or 0,
            ),
            seed=submitted.sampling.seed or 0,
            arrival_time=self._clock(),
            adapter_tier=self.manager.tier(adapter) if adapter else None,
            eos_token_ids=frozenset({STOP_TOKEN}),
        )
        self.scheduler.add(request, is_held=is_held)
        self.contents[request.request_id] = Contents(request.namespace)
        return request

    def abort(self, request_id: str) -> bool:
        """Ids that are unknown or have ended are ignored; True if this one had not."""
        request = self.scheduler.get(request_id)
        if request is None:
            return False
        self.finish(request, FinishReason.ABORTED)
        return True

    def evict(self, key: AdapterKey, drain_seconds: float = 0.0) -> None:
        self.drains.begin(key, drain_seconds)

    # --- what comes of requests, see `execution.Requests` -----------------------------------------

    def read(self, read: PromptOutput) -> None:
        raise AssertionError("`readings` keeps what was read")

    def generate(self, request: Request, generated: TokensGenerated) -> None:
        self._announced[request.request_id] += len(generated.token_ids)

    def finish(
        self, request: Request, reason: FinishReason, *, stop_token_id: int | None = None
    ) -> None:
        self.scheduler.finish(request)
        self._announce_end(request, reason.value)

    def fail(self, request: Request, error: EngineError) -> None:
        self.scheduler.finish(request)
        self._announce_end(request, error.code)

    # --- one step -------------------------------------------------------------------------------

    def step(self, faults: Faults) -> ScheduledBatch | None:
        """One iteration; returns the batch that was launched. Its time is not taken yet: see
        `observe`. Raises DeviceCrashed."""
        self.manager.poll()
        if self.border:
            self.border.poll()
        if self.host_border:
            self.host_border.poll()
        self._reap_if_due()
        if self.kv.disk:
            self.kv.disk.poll()
        self.evicted = self.drains.poll()
        self.draft_tokens.begin_step()
        self.has_read = False
        self.read_steps.clear()
        self.pipeline.read_if_needed()
        self.schedule = self.scheduler.schedule()
        for request, error in self.schedule.failed:
            self._announce_end(request, error.code)
        self.executed = batch = self.schedule.batch
        if batch:
            self._on_batch(batch)
            self._run(batch, faults)
        else:
            self.pipeline.finish_first()
            if self.pipeline.is_empty:
                self.device.launch_operations(self.kv.operations.take())
                if self._scenario.num_stages > 1:
                    self.device.flush()
        self.counts["late_leases"] += len(self.scheduler._leases.late)
        self._tell_fetcher()
        self.delivered += self._announced
        self._announced.clear()
        return batch

    def _tell_fetcher(self) -> None:
        self.manager.fetches.take_read()
        for key in self.manager.fetches.take_wanted():
            self._want(key)

    def _run(self, batch: ScheduledBatch, faults: Faults) -> None:
        """Like `StepExecutor.run`."""
        self.device.launch_operations(batch.operations)
        self.forward.faults = faults
        sequences = self.execution.current(batch.sequences)
        if sequences and self._scenario.is_async and self.pipeline.takes(sequences):
            self.counts["steps_in_flight"] += 1
            self._launched.append(sequences)
            self.pipeline.run(sequences)
            return
        if not self.pipeline.is_empty:
            self.pipeline.finish()
            sequences = self.execution.current(sequences)
        if sequences:
            sequences = self.draft_tokens.draft(sequences)
            self.executed = batch.running(sequences)
            self._name([sequence.request.request_id for sequence in sequences])
            self.execution.run(sequences)
            self.read_steps.append(sequences)

    def _name(self, request_ids: Sequence[str]) -> None:
        self.suspects = frozenset(request_ids)

    def _note_read(self, is_one_step: bool) -> None:
        self.has_read = True
        self.read_steps.append(self._launched.popleft())

    def _announce_end(self, request: Request, reason: str) -> None:
        self.contents.pop(request.request_id, None)
        self.readings.settle(request, reason)
        self.ended.append(request)
        if request.adapter and reason in ("length", "stop"):
            now, start = self._clock(), request.num_prompt_tokens
            arrived_at = request.arrival_time
            self.outputs.add(
                request.adapter, request.token_ids, start, arrived_at=arrived_at, now=now
            )
        self._on_end(request, reason)
        self.drains.note_end(request, is_deleted=reason == AdapterDeleted.code)

    def _reap_if_due(self) -> None:
        if self._clock() < self._next_reap_time:
            return
        self._next_reap_time = self._clock() + REAP_INTERVAL_SECONDS
        self.num_reaps += 1
        self.manager.reap(self.scheduler.leased_request_ids)
