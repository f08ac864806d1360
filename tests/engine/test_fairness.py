"""Fair shares: the counters, and the bound that they guarantee."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import pytest

from loraplex.engine.scheduling.fairness import MAX_IDLE_PARTIES, VirtualTokenCounters
from loraplex.engine.scheduling.waiting import WaitingQueue
from support.scale import part_of

LONGEST_PROMPT = 8
MEMORY_TOKENS = 24
BOUND = 2 * max(1 * LONGEST_PROMPT, 2 * MEMORY_TOKENS)


@dataclass(eq=False, slots=True)
class Job:
    request_id: str
    tenant_id: str
    tenant_weight: float
    num_inputs: int
    num_outputs: int
    adapter: str | None = None
    priority: int = 0
    due_time: float = 0.0
    is_late: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_inputs + self.num_outputs


class Queues:
    """The paper's: first come first served in each tenant, the least counter first."""

    def __init__(self, counters: VirtualTokenCounters[str]) -> None:
        self.counters = counters
        self.jobs: dict[str, deque[Job]] = {}

    def add(self, job: Job) -> None:
        self.counters.activate(job.tenant_id, job.tenant_weight)
        self.jobs.setdefault(job.tenant_id, deque()).append(job)

    def waiting(self) -> list[str]:
        return [*self.jobs]

    def admit(self, room: int) -> Iterator[Job]:
        while self.jobs:
            tenant = min(self.jobs, key=self.counters.counter)
            if self.jobs[tenant][0].num_tokens > room:
                return
            job = self.jobs[tenant].popleft()
            room -= job.num_tokens
            if not self.jobs[tenant]:
                del self.jobs[tenant]
                self.counters.deactivate(tenant)
            self.counters.charge(tenant, input_tokens=job.num_inputs)
            yield job


class OurQueue:
    """The same through `WaitingQueue`."""

    def __init__(self, counters: VirtualTokenCounters[str]) -> None:
        self.queue: WaitingQueue[Job] = WaitingQueue(counters, clock=lambda: 0.0)

    def add(self, job: Job) -> None:
        self.queue.add(job)

    def waiting(self) -> list[str]:
        return [*self.queue.tenants]

    def admit(self, room: int) -> Iterator[Job]:
        for job in self.queue.candidates():
            if job.num_tokens > room:
                return
            room -= job.num_tokens
            self.queue.admit(job)
            service = self.queue.counters.charge(job.tenant_id, input_tokens=job.num_inputs)
            self.queue.charge(job, service)
            yield job


class Ledger:
    """True service, and how far two tenants' drifted apart since both have been waiting."""

    def __init__(self, weights: dict[str, float]) -> None:
        self.weights = weights
        self.service: Counter[str] = Counter()
        self.worst = 0.0
        self._extremes: dict[tuple[str, str], tuple[float, float]] = {}

    def note(self, waiting: list[str]) -> None:
        extremes = {}
        shares = {tenant: self.service[tenant] / self.weights[tenant] for tenant in waiting}
        for pair in combinations(sorted(waiting), 2):
            drift = shares[pair[0]] - shares[pair[1]]
            low, high = self._extremes.get(pair, (drift, drift))
            extremes[pair] = low, high = min(low, drift), max(high, drift)
            self.worst = max(self.worst, high - low)
        self._extremes = extremes


def serve(
    seed: int, counters: VirtualTokenCounters[str], make: type[Queues] | type[OurQueue]
) -> float:
    """Run a random load; the greatest drift between two tenants while both waited."""
    rng = random.Random(seed)
    weights = {name: rng.choice((1.0, 2.0, 4.0)) for name in "abc"}
    long_prompts = {name: rng.random() < 0.5 for name in weights}
    # One tenant always has work; the others come and go.
    arrives = {name: rng.randrange(30) if name != "a" else 0 for name in weights}
    queues, ledger = make(counters), Ledger(weights)
    remaining: dict[Job, int] = {}
    for step in range(64):
        for name in weights:
            is_on = step >= arrives[name] and (name == "a" or (step - arrives[name]) % 40 < 34)
            if is_on and rng.random() < 0.7:
                for _ in range(2):
                    inputs, outputs = (LONGEST_PROMPT, 1) if long_prompts[name] else (1, 8)
                    job = Job(
                        str(rng.random()),
                        name,
                        weights[name],
                        rng.randint(1, inputs),
                        rng.randint(1, outputs),
                        rng.choice("xy"),
                    )
                    queues.add(job)
        ledger.note(queues.waiting())
        room = MEMORY_TOKENS - sum(job.num_tokens for job in remaining)
        for job in queues.admit(room):
            remaining[job] = job.num_outputs
            ledger.service[job.tenant_id] += job.num_inputs
            ledger.note(queues.waiting())
        for name, num_tokens in Counter(job.tenant_id for job in remaining).items():
            counters.charge(name, output_tokens=num_tokens)
            ledger.service[name] += 2 * num_tokens
        ledger.note(queues.waiting())
        remaining = {job: left - 1 for job, left in remaining.items() if left > 1}
    return ledger.worst


class NoLift(VirtualTokenCounters[str]):
    def _floor(self) -> float:
        return 0.0


class WeightIgnored(VirtualTokenCounters[str]):
    def activate(self, party: str, weight: float = 1.0) -> None:
        super().activate(party, 1.0)


class WeightUpsideDown(VirtualTokenCounters[str]):
    def activate(self, party: str, weight: float = 1.0) -> None:
        super().activate(party, 1.0 / weight)


class InputsFree(VirtualTokenCounters[str]):
    def charge(self, party: str, input_tokens: int = 0, output_tokens: int = 0) -> float:
        return super().charge(party, 0, output_tokens)


class OutputsFree(VirtualTokenCounters[str]):
    def charge(self, party: str, input_tokens: int = 0, output_tokens: int = 0) -> float:
        return super().charge(party, input_tokens, 0)


NUM_SEEDS = part_of(2_000, 10_000)


@pytest.mark.slow
def test_services_of_two_waiting_tenants_never_drift_apart_by_more_than_the_bound() -> None:
    worst = max(serve(seed, VirtualTokenCounters(), Queues) for seed in range(NUM_SEEDS))
    # Weights and counts are such that every sum is exact.
    assert worst <= BOUND
    assert worst > BOUND / 4, "the load does not strain the bound"


def test_the_waiting_queue_keeps_the_bound_of_its_counters() -> None:
    assert max(serve(seed, VirtualTokenCounters(), OurQueue) for seed in range(500)) <= BOUND


@pytest.mark.parametrize("make", [Queues, OurQueue])
@pytest.mark.parametrize(
    "mistaken", [NoLift, WeightIgnored, WeightUpsideDown, InputsFree, OutputsFree]
)
def test_each_planted_mistake_breaks_the_bound(
    mistaken: type[VirtualTokenCounters[str]], make: type[Queues] | type[OurQueue]
) -> None:
    assert any(serve(seed, mistaken(), make) > BOUND for seed in range(300))


def test_service_counts_outputs_double_and_is_divided_by_the_weight() -> None:
    counters: VirtualTokenCounters[str] = VirtualTokenCounters()
    counters.activate("a", 4.0)
    counters.charge("a", input_tokens=8, output_tokens=2)
    assert counters.counter("a") == 3.0


def test_a_known_service_is_divided_by_the_weight_too() -> None:
    counters: VirtualTokenCounters[str] = VirtualTokenCounters()
    counters.activate("heavy", weight=4.0)
    for _ in range(2):
        counters.add("heavy", 6.0)
        counters.add("unknown", 6.0)
    assert (counters.counter("heavy"), counters.counter("unknown")) == (3.0, 12.0)
    assert counters.charge("new", output_tokens=3) == counters.counter("new") == 6.0
    assert counters.charge("heavy", input_tokens=2) == 2.0
    assert counters.counter("heavy") == 3.5


def test_a_tenant_that_returns_is_lifted_to_the_least_of_the_active_ones() -> None:
    counters: VirtualTokenCounters[str] = VirtualTokenCounters()
    for tenant, service in (("a", 50), ("b", 70)):
        counters.activate(tenant)
        counters.charge(tenant, input_tokens=service)
    counters.activate("c")
    assert counters.counter("c") == 50.0


def test_a_tenant_that_returns_to_an_idle_server_is_lifted_to_the_last_that_left() -> None:
    counters: VirtualTokenCounters[str] = VirtualTokenCounters()
    counters.activate("a")
    counters.deactivate("a")
    counters.charge("a", output_tokens=20)  # what of it still ran
    counters.activate("b")
    assert counters.counter("b") == 40.0


def test_no_one_is_lowered_by_the_lift_nor_lifted_while_active() -> None:
    counters: VirtualTokenCounters[str] = VirtualTokenCounters()
    counters.activate("a")
    counters.activate("b")
    counters.charge("a", input_tokens=9)
    counters.activate("b")
    assert counters.counter("b") == 0.0
    counters.deactivate("a")
    counters.activate("a")
    assert counters.counter("a") == 9.0


def test_tenants_that_came_once_are_forgotten_unless_that_would_pardon_them() -> None:
    counters: VirtualTokenCounters[str] = VirtualTokenCounters()
    for tenant in ("steady", "debtor"):
        counters.activate(tenant)
    counters.charge("debtor", input_tokens=10**9)
    counters.deactivate("debtor")
    for number in range(4 * MAX_IDLE_PARTIES):
        counters.activate(str(number))
        counters.deactivate(str(number))
        counters.charge("steady", input_tokens=1)
    assert len(counters) <= MAX_IDLE_PARTIES + 2
    assert counters.counter("debtor") == 10**9
