"""The effect of one tenant's load on another's latency, on a device with a known cost per step."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from support.scheduling import SchedulerBench

SECONDS = 60.0
MAX_RATIO = 1.5
"""The victim's p99 time to first token, against that among equals at a full batch."""
LEAST_THROUGHPUT = 0.95
"""Against the same load as one tenant's: first come, first served."""


@dataclass
class Crowd:
    """A tenant that always has so many requests in flight."""

    tenant: str
    in_flight: int
    prompt: tuple[int, int]
    output: tuple[int, int]


@dataclass
class World:
    """A victim sends short requests at random times, one a second on average."""

    crowds: list[Crowd]
    is_fair: bool = True
    num_blocks: int = 700
    bench: SchedulerBench = field(init=False)
    first_token_seconds: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.bench = SchedulerBench(
            num_blocks=self.num_blocks, budget=256, max_num_seqs=16, tenant_cap=0.6
        )
        self._in_flight: Counter[str] = Counter()
        self._rng = random.Random(1)
        self._next_arrival = 0.5

    def run(self) -> World:
        while self.bench.now < SECONDS:
            self._arrive()
            self._step()
        return self

    @property
    def p99(self) -> float:
        return sorted(self.first_token_seconds)[int(0.99 * len(self.first_token_seconds))]

    def _arrive(self) -> None:
        rng = self._rng
        for crowd in self.crowds:
            while self._in_flight[crowd.tenant] < crowd.in_flight:
                prompt, output = rng.randint(*crowd.prompt), rng.randint(*crowd.output)
                self._add(crowd.tenant, prompt, output)
        while self.bench.now >= self._next_arrival:
            self._add("victim", 32, 16)
            self._next_arrival += rng.expovariate(1.0)

    def _add(self, tenant: str, prompt: int, output: int) -> None:
        self._in_flight[tenant] += 1
        name = f"{tenant}-{self._in_flight.total()}-{self.bench.now}"
        self.bench.add(name, prompt, output, tenant=tenant if self.is_fair else "all")

    def _step(self) -> None:
        bench = self.bench
        batch = bench.scheduler.schedule().batch
        assert batch
        shape = batch.shape
        seconds = 0.01 + 1e-4 * shape.num_prefill_tokens + 2e-4 * shape.num_decodes
        bench.now += seconds
        bench.scheduler.observe(batch, seconds)
        for sequence in batch.sequences:
            request = sequence.request
            bench.scheduler.take([(sequence, [0] if sequence.samples else [], 0)])
            if not sequence.samples:
                continue
            tenant = request.request_id.partition("-")[0]
            self.num_tokens += 1
            if request.num_generated_tokens == 1:
                self.num_tokens += request.num_prompt_tokens
                if tenant == "victim":
                    self.first_token_seconds.append(bench.now - request.arrival_time)
            if request.num_generated_tokens == request.submitted.sampling.max_tokens:
                bench.scheduler.finish(request)
                self._in_flight[tenant] -= 1


EQUALS = [Crowd(f"equal{index}", 12, (20, 60), (10, 60)) for index in range(3)]
FLOOD = [Crowd("flood", 120, (100, 400), (50, 200))]
SQUEEZE = [Crowd("squeeze", 40, (200, 300), (300, 400))]
"""Fills the blocks, then forces preemptions by growing."""


@pytest.mark.slow
def test_a_flood_delays_others_no_more_than_a_full_batch_of_equals_does() -> None:
    among_equals = World(EQUALS).run().p99
    for crowds in (FLOOD, SQUEEZE):
        fair = World(crowds).run()
        unfair = World(crowds, is_fair=False).run()
        assert fair.p99 <= MAX_RATIO * among_equals
        assert unfair.p99 > MAX_RATIO * among_equals, "the load was meant to hurt"
        assert fair.num_tokens >= LEAST_THROUGHPUT * unfair.num_tokens
