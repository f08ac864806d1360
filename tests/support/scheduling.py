"""A scheduler without a model: a simulated device computes the scheduled sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import Failure, Lease, Tier
from loraplex.engine.errors import EngineError
from loraplex.engine.kv.blocks import KvBlocks
from loraplex.engine.kv.layout import KvGroup
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.kv_policy import KvPolicy
from loraplex.engine.messages import NO_TARGETS, GenerationRequest, LatencyTargets, RequestStarted
from loraplex.engine.model.inputs import padding_class
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.batch import ScheduledBatch
from loraplex.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from loraplex.engine.scheduling.step_costs import StepCosts
from loraplex.kernels.attention_window import AttentionWindow

BLOCK = 4


class FakeAdapterManager:
    """Adapters that are resident because the test says so."""

    def __init__(self) -> None:
        self.resident: set[AdapterKey] = set()
        self.failures: dict[AdapterKey, Failure] = {}
        self.leases: dict[str, Lease] = {}
        self.requested: list[AdapterKey] = []
        self.expected: list[AdapterKey] = []
        self.capacity = 1000
        """Adapters that the device holds; each takes as much of it."""

    def request(self, key: AdapterKey) -> None:
        self.requested.append(key)

    def expect(self, keys: Iterable[AdapterKey]) -> None:
        self.expected = list(keys)

    def expect_last(self, key: AdapterKey) -> None:
        self.request(key)

    def acquire(self, key: AdapterKey, request_id: str) -> Lease | None:
        if key not in self.resident:
            return None
        return self.leases.setdefault(request_id, Lease(key, request_id, hash(key) % 7, 1))

    def is_settled(self, key: AdapterKey) -> bool:
        return key in self.resident or key in self.failures

    def release(self, request_id: str) -> None:
        self.leases.pop(request_id, None)

    def tier(self, key: AdapterKey) -> Tier:
        return Tier.DEVICE if key in self.resident else Tier.STORE

    def failure(self, key: AdapterKey) -> Failure | None:
        return self.failures.get(key)

    def loaded_from(self, key: AdapterKey) -> Tier | None:
        return Tier.DISK

    def load_seconds(self, key: AdapterKey) -> float:
        return 0.25

    def claim_load(self, key: AdapterKey) -> int:
        return 0

    def leased_share(self, tenant_id: str) -> float:
        leased = {lease.key for lease in self.leases.values() if lease.key.tenant_id == tenant_id}
        return len(leased) / self.capacity


class SchedulerBench:
    """Draws token 0 for whatever samples; one `step` takes `step_seconds` of the clock."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        budget: int = 32,
        max_num_seqs: int = 8,
        prefix_caching: bool = False,
        num_swap_slots: int = 0,
        window: int | None = None,
        tenant_cap: float = 1.0,
        kv_block_bytes: tuple[int, ...] = (),
        target_itl_seconds: float | None = None,
        target_ttft_seconds: float | None = None,
        max_queued: int = 10_000,
        max_queued_per_tenant: int = 10_000,
        step_seconds: float = 0.0,
    ) -> None:
        groups = [KvGroup((0,), None, 0, num_blocks + 1)]
        slots = [num_swap_slots]
        if window is not None:
            groups.append(KvGroup((1,), AttentionWindow(window), 0, num_blocks + 1))
            slots.append(num_swap_slots)
        self.kv = KvBlocks(
            groups,
            BLOCK,
            prefix_secret=bytes(range(32)) if prefix_caching else None,
            num_swap_slots=slots,
            clock=lambda: self.now,
        )
        self.manager = FakeAdapterManager()
        self.costs = StepCosts()
        self.now = 0.0
        self.step_seconds = step_seconds
        self.limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=10_000,
            block_size=BLOCK,
            targets=LatencyTargets(target_ttft_seconds, target_itl_seconds),
            max_queued=max_queued,
            max_queued_per_tenant=max_queued_per_tenant,
            tenant_cap=tenant_cap,
            kv_block_bytes=kv_block_bytes,
        )
        self.scheduler = Scheduler(
            self.limits,
            kv=self.kv,
            manager=self.manager,
            costs=self.costs,
            clock=lambda: self.now,
        )
        self.finished: dict[str, int] = {}
        """How many tokens each request that ended had generated."""
        self.failed: dict[str, EngineError] = {}
        self.started: dict[str, RequestStarted] = {}

    def add(
        self,
        name: str,
        prompt: int | list[int],
        max_tokens: int = 1,
        adapter: AdapterKey | None = None,
        tier: Tier | None = None,
        *,
        tenant: str = "acme",
        weight: float = 1.0,
        group: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        is_held: bool = False,
        kv_policy: KvPolicy | None = None,
        is_background: bool = False,
        is_further: bool = False,
        targets: LatencyTargets = NO_TARGETS,
    ) -> Request:
        tokens = [1] * prompt if isinstance(prompt, int) else prompt
        submitted = GenerationRequest(
            name,
            tenant,
            tokens,
            SamplingParams(max_tokens=max_tokens),
            adapter,
            group_id=group,
            priority=priority,
            tenant_weight=weight,
            deadline_seconds=deadline,
            kv_policy=kv_policy,
            is_background=is_background,
            is_further=is_further,
            targets=targets,
        )
        namespace = CacheNamespace(tenant, "runtime", adapter)
        request = Request(submitted, namespace, 0, self.now, tier)
        self.scheduler.add(request, is_held=is_held)
        return request

    def step(self) -> ScheduledBatch | None:
        """Schedule, check what must always hold, and compute."""
        batch, started, failed = self.scheduler.schedule()
        self.check(batch)
        self.started |= {event.request_id: event for event in started}
        self.failed |= {request.request_id: error for request, error in failed}
        self.now += self.step_seconds
        if batch:
            self.scheduler.note_launch(batch.sequences)
            self.process(batch)
        self.kv.check_integrity(request.kv for request in self.scheduler.requests())
        return batch

    def process(self, batch: ScheduledBatch) -> None:
        """Give each request of a launched step what the step computes."""
        for sequence in batch.sequences:
            request = sequence.request
            if request.has_ended:
                continue
            self.scheduler.take([(sequence, [0] if sequence.draws else [], 0)])
            if sequence.draws and len(request.token_ids) == request.max_num_tokens:
                self.scheduler.finish(request)
                self.finished[request.request_id] = request.num_generated_tokens
        self.scheduler.note_read()
        if self.step_seconds:
            self.scheduler.observe(batch, self.step_seconds)

    def check(self, batch: ScheduledBatch | None) -> None:
        if batch is None:
            return
        assert 0 < batch.num_tokens <= self.limits.max_num_batched_tokens
        assert batch.num_tokens == sum(sequence.num_tokens for sequence in batch.sequences)
        assert len(batch.sequences) <= self.limits.max_num_seqs
        kinds = [sequence.is_decode for sequence in batch.sequences]
        assert kinds == sorted(kinds, reverse=True), "decodes come first"
        rows = [s.lease.row if s.lease else -1 for s in batch.sequences]
        decodes = [
            (padding_class(-(-sequence.context_len // BLOCK)), row)
            for sequence, row in zip(batch.sequences, rows, strict=True)
            if sequence.is_decode
        ]
        assert decodes == sorted(decodes), "decodes are grouped by padding class, then by adapter"
        prefills = rows[sum(kinds) :]
        assert prefills == sorted(prefills), "prefills are grouped by adapter"
        for sequence in batch.sequences:
            request = sequence.request
            num_tokens = len(request.token_ids) + request.num_pending_tokens
            assert sequence.known_end <= num_tokens
            assert all(sequence.context_len <= len(t) * BLOCK for t in request.kv.tables)
            assert not request.kv.is_swapped
            assert (request.lease is None) == (request.adapter is None)

    def run(self, limit: int = 10_000) -> int:
        """Step until nothing is left; the number of steps."""
        for count in range(limit):
            if not self.scheduler.has_requests:
                return count
            self.step()
        raise AssertionError("the scheduler made no progress")

    def state(self, name: str) -> str:
        request = self.scheduler.get(name)
        if request is None:
            return "gone"
        return "running" if request in self.scheduler._running else "waiting"

    def assert_empty(self) -> None:
        """Nothing is held by anyone."""
        assert not self.scheduler.has_requests
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.manager.leases == {}
        assert not self.scheduler._groups._members
        assert not self.scheduler._shares._members
        assert not self.scheduler._deadlines._live
        assert not self.scheduler._late_times._live
        assert not self.scheduler._backlog._tenants
        assert not self.scheduler._background.requests
        self.kv.check_integrity([])
        assert self.kv.num_free(0) == self.kv.num_usable(0)


def counts(batch: ScheduledBatch | None) -> dict[str, int]:
    """How many tokens of which request a step computes."""
    assert batch is not None
    return {sequence.request.request_id: sequence.num_tokens for sequence in batch.sequences}


def steps_until(bench: SchedulerBench, condition: Callable[[], object], limit: int = 500) -> int:
    """Step until the condition holds; the number of steps."""
    for count in range(limit):
        if condition():
            return count
        bench.step()
    raise AssertionError("it did not come to that")
