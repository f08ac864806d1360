"""One seed: an engine, its tenants and its faults, step by step on a virtual clock."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from typing import NamedTuple

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.record import MAX_BACKOFF_SECONDS
from loraplex.engine.errors import AdapterDeleted, NotNow, PromptTooLong
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.request import Request
from loraplex.engine.scheduling.batch import ScheduledBatch

from .demand import Demand
from .disk import FakeDisk
from .engine import SimulatedEngine
from .forward import DeviceCrashed, Faults
from .invariants import Checks
from .ledger import LOAD_ERROR_CODES, Ledger
from .nemesis import Nemesis
from .scenario import Scenario
from .store import FakeStore
from .violation import Invariant, Violation, require

IDLE_SECONDS = 0.01
MAX_DRAINED_REQUESTS = 24
MAX_DRAIN_STEPS = 4000


class Outcome(NamedTuple):
    """What one seed gave."""

    seed: int
    num_steps: int
    violation: str | None
    num_leaked: int
    coverage: Counter[str]
    log_hash: str


class World:
    """Everything of one seed. `log` gets each line of the event log."""

    def __init__(self, scenario: Scenario, *, log: Callable[[str], None] | None = None) -> None:
        self.scenario = scenario
        self.rng = Random(scenario.seed + 1)
        self.now = 1000.0
        self.num_steps = 0
        self.coverage: Counter[str] = Counter()
        self.ledger = Ledger()
        self.demand = Demand(scenario, self.rng)
        self.store = FakeStore(self.rng, scenario.adapter_sizes, lambda: self.now, scenario.mishaps)
        self.deleting: dict[AdapterKey, int] = {}
        """Deletions that the engine has not answered, and the step of each."""
        self.deadlines: dict[AdapterKey, float] = {}
        """When the last request of each of them must have ended."""
        self.pinned: list[AdapterKey] = []
        self._log = log
        self._hash = hashlib.blake2b(digest_size=16)
        self._events: list[object] = []
        self.disk = (
            FakeDisk(Random(-scenario.seed - 1), mishaps=scenario.mishaps)
            if scenario.num_disk_slots
            else None
        )
        self.engine = self._start_engine()
        self.checks = Checks(self)
        self.nemesis = Nemesis(self)

    # --- running --------------------------------------------------------------------------------

    def run(self, num_steps: int) -> Outcome:
        """`num_steps` under fire, then calm until every request has ended."""
        violation, num_leaked = None, 0
        try:
            for _ in range(num_steps):
                self._step(self.nemesis.strike())
            self._drain()
            num_leaked = self.checks.num_leaked()
            require(not num_leaked, Invariant.QUIESCENT, f"{num_leaked} things are still held")
            self.checks.costs.check_blocks()
        except Violation as found:
            violation = str(found)
        except Exception as error:  # an assertion of the code under test is a finding too
            violation = f"{type(error).__name__}: {error}"
            if self._log:
                raise
        if violation:
            self.note("violation", violation)
            self._write_log()
        self._collect_coverage()
        ends = self.ledger.num_ends
        self.coverage["nan_rows"] = ends["numerical_error"]
        self.coverage["deadline_expired"] = ends["deadline_exceeded"]
        self.coverage["adapter_failures"] = sum(ends[code] for code in LOAD_ERROR_CODES)
        self.coverage["successes"] = ends["length"] + ends["stop"]
        return Outcome(
            self.scenario.seed,
            self.num_steps,
            violation,
            num_leaked,
            self.coverage,
            self._hash.hexdigest(),
        )

    def _step(self, faults: Faults) -> None:
        self.store.answer(self.engine.manager)
        self.ledger.troubled.update(self.store.take_troubled())
        self._run_loaders()
        try:
            batch = self.engine.step(faults)
        except DeviceCrashed as crash:
            self._crash(crash.request_id)
            return
        self._take_evicted()
        for started in self.engine.schedule.started:
            self.coverage["prefix_hits"] += started.num_cached_tokens > 0
        self.checks.after_step(batch)
        self._pass_time(batch)
        self.num_steps += 1
        self.note("batch", _describe(batch))
        self._write_log()

    def _drain(self) -> None:
        """The nemesis rests and the store is well: whoever still waits must be served."""
        self.nemesis.rest()
        for request_id in list(self.ledger.live)[MAX_DRAINED_REQUESTS:]:
            self.abort(request_id)  # a long queue would take long and show nothing more
        self.advance(MAX_BACKOFF_SECONDS)
        for _ in range(MAX_DRAIN_STEPS):
            if not self.ledger.live and self.is_still and self.checks.are_pins_settled():
                return
            self._step(Faults())
        waiting = [order.submitted.request_id for order in self.ledger.live.values()]
        require(self.checks.are_pins_settled(), Invariant.PINS, "a pin never comes back")
        require(False, Invariant.PROGRESS, f"{waiting} never end, nothing hinders them")

    @property
    def is_still(self) -> bool:
        """Nothing will change any more by itself."""
        manager = self.engine.manager
        disk = self.engine.kv.disk
        if not self.engine.pipeline.is_empty or (disk is not None and disk.is_busy):
            return False
        return not (self.store.next_answer or len(self.engine.loaders) or manager.has_pending_work)

    def _run_loaders(self) -> None:
        """The loader threads get on with some of their work, at times in another order."""
        loaders = self.engine.loaders
        while len(loaders) and self.rng.random() < 0.7:
            error = None
            if self.nemesis.breaks_load():
                error = RuntimeError("the copy failed")
                self.ledger.troubled.update(self.scenario.adapter_sizes)  # whose, it does not say
                self.coverage["failed_loads"] += 1
            loaders.run(self.rng.randrange(len(loaders)), error=error)

    def _pass_time(self, batch: ScheduledBatch | None) -> None:
        if batch is None:
            self.advance(IDLE_SECONDS)
            self.checks.costs.after_step(0.0)
            return
        batch = self.engine.executed or batch
        seconds = self.scenario.true_seconds.of(batch.shape, self.rng)
        swap_seconds = self.scenario.swap_block_seconds * self.engine.device.num_moved_blocks
        self.advance(seconds + swap_seconds)
        self.checks.costs.after_step(seconds + swap_seconds)
        self.engine.scheduler.observe(batch, seconds + swap_seconds, swap_seconds)

    def advance(self, seconds: float) -> None:
        """Let the clock go on."""
        self.checks.costs.pass_time(seconds)
        self.now += seconds

    # --- what befalls the engine ----------------------------------------------------------------

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        for submitted in requests:
            self._submit(submitted)

    def _submit(self, submitted: GenerationRequest) -> None:
        before = self.checks.before_add(submitted)
        try:
            request = self.engine.submit(submitted)
        except (PromptTooLong, NotNow, AdapterDeleted) as refusal:
            self.checks.after_refusal(submitted, refusal, before)
            self.ledger.refuse(submitted, refusal.code)
            self.coverage["refused"] += 1
            self.coverage[f"refused_{refusal.code}"] += 1
            self.note("refused", submitted.request_id, refusal.code)
            return
        self.checks.after_add(submitted, before)
        order = self.ledger.open(submitted, request)
        if request.deadline is not None:
            order.allowed.add("deadline_exceeded")
        adapter = submitted.adapter
        if adapter and self.scenario.adapter_sizes[adapter] > self.engine.arena.reserved:
            order.allowed.add("adapter_too_large")
        self.coverage["requests"] += 1
        self.coverage["groups"] += submitted.group_id is not None
        self.note("add", submitted.request_id, submitted.tenant_id, submitted.adapter)

    def abort(self, request_id: str) -> bool:
        order = self.ledger.live.get(request_id)
        if order:
            order.allowed.add("aborted")
        was_live = self.engine.abort(request_id)
        require(was_live == (order is not None), Invariant.ONE_END, f"abort of {request_id}")
        self.note("abort", request_id, was_live)
        return was_live

    def delete(self, key: AdapterKey, drain_seconds: float) -> None:
        self.store.deleted.add(key)
        self.ledger.troubled.add(key)
        self.deleting.setdefault(key, self.num_steps)
        deadline = self.now + drain_seconds
        self.deadlines[key] = min(self.deadlines.get(key, deadline), deadline)
        if key in self.pinned:
            self.pinned.remove(key)
        self.engine.evict(key, drain_seconds)
        self.checks.during_deletion(key)
        left = [order for order in self.ledger.live.values() if order.submitted.adapter == key]
        self.coverage["drains"] += bool(left)
        require(drain_seconds or not left, Invariant.ONE_END, f"{len(left)} of {key} go on")
        self.note("delete", key, drain_seconds)

    def pin(self, keys: list[AdapterKey]) -> None:
        """These and no others."""
        self.pinned = [key for key in keys if key not in self.deleting]
        self.engine.manager.set_pinned(self.pinned)
        self.note("pin", self.pinned)

    def restart(self) -> None:
        """The process dies: its state is lost, and who had not started is submitted again once."""
        self._collect_coverage()
        self.coverage["restarts"] += 1
        orders = list(self.ledger.live.values())
        for order in orders:
            order.allowed.add("engine_restarted")
            self.ledger.end(order.request, "engine_restarted")
        self.store.forget_wishes()
        if self.disk:
            self.disk.forget_work()
            for key in self.deleting:
                self.disk.erase_now(key)
        self.deleting.clear()
        self.deadlines.clear()
        self.engine = self._start_engine()
        self.checks = Checks(self)
        self.engine.manager.set_pinned(self.pinned)
        self.note("restart", len(orders))
        self.submit(
            self.demand.again(order.submitted) for order in orders if not order.request.started
        )

    def _crash(self, request_id: str) -> None:
        """The process dies in a step, with others of whoever was in it."""
        self.checks.after_crash(request_id)
        self.coverage["crashes"] += 1
        self.num_steps += 1
        self.note("crash", request_id)
        self.restart()
        self._write_log()

    def note(self, *event: object) -> None:
        self._events.append(event)

    # --- inside ---------------------------------------------------------------------------------

    def _start_engine(self) -> SimulatedEngine:
        engine = SimulatedEngine(
            self.scenario,
            clock=lambda: self.now,
            want=self.store.want,
            on_batch=lambda batch: self.checks.before_run(batch),
            on_end=self._end,
            disk=self.disk,
        )
        engine.host.files = self.store.files
        return engine

    def _end(self, request: Request, reason: str) -> None:
        order = self.ledger.end(request, reason)
        self.checks.after_end(order, reason)
        if reason in ("length", "stop"):
            self.demand.remember(list(request.token_ids))
        self.note("end", request.request_id, reason)

    def _take_evicted(self) -> None:
        for key, receipt in self.engine.evicted:
            require(key in self.deleting, Invariant.QUIESCENT, f"{key} was not deleted")
            del self.deleting[key], self.deadlines[key]
            self.checks.after_eviction(key)
            self.coverage["drained"] += receipt.num_drained
            self.note("evicted", key, receipt)

    def _collect_coverage(self) -> None:
        """Take over what the engine counted before it goes."""
        engine, coverage = self.engine, self.coverage
        coverage["preemptions"] += engine.scheduler.num_preemptions
        coverage["swaps"] += engine.scheduler.num_swaps
        coverage["swaps_in"] += engine.device.counts["swaps_in"]
        coverage["host_prefixes"] += sum(group.host.num_stored for group in engine.kv.groups)
        coverage["host_fetches"] += sum(group.num_fetched for group in engine.kv.groups)
        coverage["host_evictions"] += sum(
            group.host.prefixes.num_evictions for group in engine.kv.groups
        )
        if self.disk:
            coverage.update(self.disk.counts)
            self.disk.counts.clear()
        coverage["disk_waits_given_up"] += engine.scheduler.num_disk_waits_given_up
        coverage["compactions"] += engine.device.counts["compactions"]
        coverage["states"] += engine.device.counts["states"]
        coverage["copies"] += engine.device.counts["copies"]
        coverage["prefix_evictions"] += sum(
            group.cached.num_evictions for group in engine.kv.groups
        )
        coverage["evictions"] += engine.manager.num_evictions
        coverage["adapter_loads"] += engine.manager.num_loads
        for reason, count in engine.manager.reports.tier_stats().evictions.items():
            coverage[f"departures_{reason}"] += count
        coverage["border_moves"] += engine.border.num_moves if engine.border else 0
        coverage["host_border_moves"] += engine.host_border.num_moves if engine.host_border else 0
        coverage["host_slots_given_up"] += engine.device.counts["slots_given_up"]
        coverage["blocks_given_back"] += engine.device.counts["given_back"]
        coverage["blocks_moved"] += sum(group.num_moved for group in engine.kv.groups)
        coverage["moves"] += engine.manager.reports.tier_stats().num_moves
        coverage["leases_reaped"] += engine.manager.reports.tier_stats().num_leases_reaped
        coverage["reaps"] += engine.num_reaps
        coverage["forks"] += engine.scheduler.num_forks
        coverage["displaced"] += engine.scheduler.num_displaced
        coverage["reclaims"] += engine.scheduler.num_reclaims
        coverage["window_frees"] += self.checks.num_window_frees
        coverage.update(engine.draft_tokens.counts + engine.forward.counts)
        coverage.update(engine.readings.counts + engine.counts)

    def _write_log(self) -> None:
        line = repr((self.num_steps, round(self.now, 9), self._events))
        self._hash.update(line.encode())
        if self._log:
            self._log(line)
        self._events.clear()


def _describe(batch: ScheduledBatch | None) -> object:
    if batch is None:
        return None
    sequences = [
        (request.request_id, num_tokens, num_draft_tokens, start)
        for request, num_tokens, num_draft_tokens, start, *_ in batch.sequences
    ]
    return sequences, batch.operations
