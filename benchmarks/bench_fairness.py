"""TTFT of a well-behaved tenant under overload by other tenants.

    make bench-fairness

The victim sends short requests, one at a time. Equal: together with tenants of equal share that
keep the batch full and more requests waiting. Flood: one of them keeps ten times as many requests
open. Squeeze: one tenant alone has filled the KV cache with long outputs before the victim starts.
The bar for p99 is 1.5 times the equal case.

Fairness must not reduce throughput: the same mixed load is served once with its tenants and once as
a single tenant, which makes it first come, first served. The bar is 0.95.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from benchmarks.report import Row, parse_options, print_report
from benchmarks.timed_engine import (
    MEASURED_SHAPE,
    SMOKE_SHAPE,
    Order,
    TimedEngine,
    kv_bytes_per_token,
    make_model,
    random_prompt,
)

from loraplex.api.bench.models import BaseShape
from loraplex.api.bench.summary import RequestTiming, percentile

VICTIM = "victim"


@dataclass(frozen=True)
class Plan:
    shape: BaseShape = MEASURED_SHAPE
    num_victim_requests: int = 100
    num_peers: int = 3
    max_num_seqs: int = 16
    flood_factor: int = 10
    num_prompt_tokens: int = 64
    num_victim_outputs: int = 6
    num_outputs: int = 48
    num_long_outputs: int = 400
    num_kv_tokens: int = 2_560
    """Room for a full batch of ordinary requests, not of long ones."""
    swap_bytes: int = 64 << 20
    """In the throughput's second comparison; in all else preempted prompts are computed again."""
    num_fill_steps: int = 120
    """Before the victim's first request: for the others to take what there is."""
    max_pause_steps: int = 8
    """Between the victim's requests."""

    @property
    def num_load_victims(self) -> int:
        """The victim's requests in the mixed load, which ends."""
        return max(1, self.num_victim_requests // 5)


SMOKE = Plan(
    SMOKE_SHAPE,
    num_victim_requests=5,
    num_peers=2,
    max_num_seqs=4,
    flood_factor=3,
    num_prompt_tokens=20,
    num_victim_outputs=2,
    num_outputs=6,
    num_long_outputs=60,
    num_kv_tokens=192,
    num_fill_steps=12,
    max_pause_steps=2,
)


@dataclass(frozen=True)
class Tenant:
    """One who asks again as soon as it is answered."""

    tenant_id: str
    num_open: int
    """Requests it keeps open."""
    num_output_tokens: int


@dataclass(frozen=True)
class Outcome:
    """A scenario as the victim met it."""

    name: str
    victim: list[RequestTiming]
    num_running: list[int]
    """Other tenants' sequences when each of the victim's requests came."""
    num_preemptions: int

    def ttft_ms(self, percent: float) -> float:
        return ttft_ms(self.victim, percent)

    def as_row(self, equal: Outcome) -> Row:
        return {
            "victim beside": self.name,
            "TTFT p50, ms": self.ttft_ms(50),
            "TTFT p99, ms": self.ttft_ms(99),
            "p99 over equal": self.ttft_ms(99) / equal.ttft_ms(99),
            "others at once": statistics.fmean(self.num_running),
            "preemptions": self.num_preemptions,
        }


@dataclass(frozen=True)
class Throughput:
    """The mixed load, served once or more."""

    tokens_per_second: float
    num_steps: int
    """Of one run: the same work in other steps, whatever else the machine does meanwhile."""
    victim_ttft_p99_ms: float
    answers: list[list[int]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__ or "", arguments)
    plan = SMOKE if options.is_smoke else Plan()
    model = make_model(options.models, plan.shape)
    outcomes = [meet(model, plan, name, others) for name, others in scenarios(plan).items()]
    fair, fcfs = compare_throughput(model, plan)
    fair_swap, fcfs_swap = compare_throughput(model, plan, swap_bytes=plan.swap_bytes)
    equal, flood, squeeze = outcomes
    print_report(
        "fairness",
        [outcome.as_row(equal) for outcome in outcomes],
        victim_requests=plan.num_victim_requests,
        flood_p99_over_equal=flood.ttft_ms(99) / equal.ttft_ms(99),
        squeeze_p99_over_equal=squeeze.ttft_ms(99) / equal.ttft_ms(99),
        fair_tokens_per_second=fair.tokens_per_second,
        fcfs_tokens_per_second=fcfs.tokens_per_second,
        fair_steps=fair.num_steps,
        fcfs_steps=fcfs.num_steps,
        throughput_over_fcfs=fair.tokens_per_second / fcfs.tokens_per_second,
        throughput_over_fcfs_with_swap=fair_swap.tokens_per_second / fcfs_swap.tokens_per_second,
        fair_victim_ttft_p99_ms=fair.victim_ttft_p99_ms,
        fcfs_victim_ttft_p99_ms=fcfs.victim_ttft_p99_ms,
        requests_answered_differently=sum(
            a != b for a, b in zip(fair.answers, fcfs.answers, strict=True)
        ),
    )
    return 0


def scenarios(plan: Plan) -> dict[str, list[Tenant]]:
    """Who shares the engine with the victim."""
    peers = [
        Tenant(f"peer-{index}", plan.max_num_seqs, plan.num_outputs)
        for index in range(plan.num_peers)
    ]
    flooding = replace(peers[0], num_open=plan.flood_factor * plan.max_num_seqs)
    squeezing = Tenant("squeezer", 2 * plan.max_num_seqs, plan.num_long_outputs)
    return {
        "equal shares": peers,
        f"{plan.flood_factor} x flood": [flooding, *peers[1:]],
        "fill and squeeze": [squeezing],
    }


def make_engine(model: Path, directory: str, plan: Plan, *, swap_bytes: int = 0) -> TimedEngine:
    engine = TimedEngine(
        model,
        Path(directory),
        max_num_seqs=plan.max_num_seqs,
        kv_cache_bytes=plan.num_kv_tokens * kv_bytes_per_token(plan.shape),
        prefix_caching=False,
        swap_bytes=swap_bytes,
    )
    engine.warm_up((1, plan.max_num_seqs))
    return engine


def meet(model: Path, plan: Plan, name: str, others: Sequence[Tenant]) -> Outcome:
    """Let the others fill the engine, then the victim ask one question after another."""
    rng = Random(1)
    with tempfile.TemporaryDirectory() as directory:
        engine = make_engine(model, directory, plan)
        step = _busy_step(engine, plan, others, rng)
        for _ in range(plan.num_fill_steps):
            step()
        asked, num_running = [], []
        for _ in range(plan.num_victim_requests):
            prompt = random_prompt(rng, plan.shape, plan.num_prompt_tokens)
            num_running.append(engine.num_running)
            asked.append(engine.send(Order(prompt, plan.num_victim_outputs, VICTIM)))
            while engine.is_open(asked[-1]):
                step()
            for _ in range(rng.randint(0, plan.max_pause_steps)):
                step()
        num_preemptions = engine.core.stats().num_preemptions
        outcome = Outcome(name, engine.timings(asked), num_running, num_preemptions)
        engine.close()
    return outcome


def _busy_step(
    engine: TimedEngine, plan: Plan, others: Sequence[Tenant], rng: Random
) -> Callable[[], None]:
    """A step before which every other tenant has replaced its ended requests."""
    open_ids: dict[str, list[str]] = {tenant.tenant_id: [] for tenant in others}

    def step() -> None:
        for tenant in others:
            still_open = [i for i in open_ids[tenant.tenant_id] if engine.is_open(i)]
            still_open += engine.send_all(
                Order(
                    random_prompt(rng, plan.shape, plan.num_prompt_tokens),
                    tenant.num_output_tokens,
                    tenant.tenant_id,
                )
                for _ in range(tenant.num_open - len(still_open))
            )
            open_ids[tenant.tenant_id] = still_open
        engine.step()

    return step


def mixed_load(plan: Plan) -> list[tuple[int, Order]]:
    """Orders by their step: a flood, long outputs and a peer at once, then the victim's."""
    rng = Random(2)

    def orders(tenant_id: str, count: int, num_output_tokens: int) -> list[Order]:
        return [
            Order(
                random_prompt(rng, plan.shape, plan.num_prompt_tokens),
                num_output_tokens,
                tenant_id,
            )
            for _ in range(count)
        ]

    others = [
        *orders("flood", 5 * plan.max_num_seqs, plan.num_outputs),
        *orders("squeezer", plan.max_num_seqs // 2, plan.num_long_outputs),
        *orders("peer", plan.max_num_seqs, plan.num_outputs),
    ]
    victims = orders(VICTIM, plan.num_load_victims, plan.num_victim_outputs)
    pause = plan.num_victim_outputs + plan.max_pause_steps
    return [(0, order) for order in others] + [
        (index * pause, order) for index, order in enumerate(victims, start=1)
    ]


def compare_throughput(
    model: Path, plan: Plan, *, swap_bytes: int = 0
) -> tuple[Throughput, Throughput]:
    """The mixed load fair and first come, first served; a machine's drift meets both alike."""
    load = mixed_load(plan)
    as_one = [(step, replace(order, tenant_id="everyone")) for step, order in load]
    runs = [
        serve_load(model, plan, orders, swap_bytes=swap_bytes)
        for orders in (load, as_one, as_one, load)
    ]
    return average([runs[0], runs[3]]), average(runs[1:3])


def average(runs: Sequence[Throughput]) -> Throughput:
    return replace(
        runs[0],
        tokens_per_second=statistics.harmonic_mean(run.tokens_per_second for run in runs),
        victim_ttft_p99_ms=statistics.fmean(run.victim_ttft_p99_ms for run in runs),
    )


def serve_load(
    model: Path, plan: Plan, load: Sequence[tuple[int, Order]], *, swap_bytes: int
) -> Throughput:
    """All of the load to its end; prompt tokens count once, however often they were computed."""
    with tempfile.TemporaryDirectory() as directory:
        engine = make_engine(model, directory, plan, swap_bytes=swap_bytes)
        began = time.perf_counter()
        ids: list[str] = []
        num_steps = 0
        while len(ids) < len(load) or engine.num_open:
            while len(ids) < len(load) and load[len(ids)][0] <= num_steps:
                ids.append(engine.send(load[len(ids)][1]))
            engine.step()
            num_steps += 1
        seconds = time.perf_counter() - began
        num_tokens = sum(len(order.prompt) + order.num_output_tokens for _, order in load)
        throughput = Throughput(
            tokens_per_second=num_tokens / seconds,
            num_steps=num_steps,
            victim_ttft_p99_ms=ttft_ms(engine.timings(ids[-plan.num_load_victims :]), 99),
            answers=engine.tokens(ids),
        )
        engine.close()
    return throughput


def ttft_ms(timings: Sequence[RequestTiming], percent: float) -> float:
    return percentile([1_000 * timing.ttft_seconds for timing in timings], percent)


if __name__ == "__main__":
    sys.exit(main())
