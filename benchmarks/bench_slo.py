"""Goodput under overload with and without a TTFT target.

    make bench-slo

The real scheduler on a simulated device and clock, so that the figures depend on nothing but the
seed and Python's hashes of strings, which order a batch. Requests arrive independently (Poisson) at
a multiple of the capacity, which is measured first: the rate at which a queue that never empties is
served. All arms get the same arrivals and are judged by the same objective: TTFT at most 1 s, and a
mean ITL at most 50 ms. Goodput is the requests that meet it per second of arrivals; the attained
share is their part of all that were sent. Refused clients do not come again.

Even: four tenants ask equally often. Flood: one sends nineteen of twenty requests; "quiet refused"
and "quiet attained" are the shares of the other three. Classes: as even, but half of each tenant's
requests are lenient, with a TTFT of at most 10 s; the target "class" tells the scheduler, "TTFT"
gives all the strict one. "strict attained" and "lenient attained" are judged by the own class.
"late" is the part of the served requests whose TTFT missed its class. Tenant classes: two of the
tenants are lenient instead.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from benchmarks.report import Row, parse_options, print_report

from loraplex.adapters.identity import AdapterKey
from loraplex.api.bench.summary import percentile
from loraplex.engine.errors import Overloaded
from loraplex.engine.messages import NO_TARGETS, LatencyTargets
from loraplex.engine.scheduling.batch import ScheduledBatch
from simulation.device import StepSeconds
from support.scheduling import SchedulerBench

TTFT_SECONDS = 1.0
LENIENT_TTFT_SECONDS = 10.0
ITL_SECONDS = 0.05
DEVICE = StepSeconds(
    base=8e-3,
    per_prefill_token=6e-5,
    per_decode=1e-4,
    per_context_token=1e-7,
    per_draft_token=0.0,
)
"""Of the order of an 8B base on one GPU."""
ARRIVALS = ("even", "flood", "classes", "tenant classes")
FLOOD = 19
"""Requests of the loud tenant for each of all others together."""


@dataclass(frozen=True)
class Plan:
    num_requests: int = 2_000
    num_capacity_requests: int = 600
    num_tenants: int = 4
    num_adapters: int = 8
    """Of each tenant; all are resident."""
    max_num_seqs: int = 64
    mean_prompt_tokens: int = 400
    mean_output_tokens: int = 150
    loads: tuple[float, ...] = (0.7, 1.0, 2.0)


SMOKE = Plan(
    num_requests=300,
    num_capacity_requests=40,
    max_num_seqs=8,
    mean_prompt_tokens=50,
    mean_output_tokens=30,
    loads=(2.0,),
)


@dataclass(frozen=True, slots=True)
class Call:
    """One request and when it comes."""

    name: str
    seconds: float
    tenant: str
    adapter: AdapterKey
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_seconds: float
    """By which it is judged."""


@dataclass
class Timing:
    """When a request came, and its first and last token."""

    arrived: float
    num_output_tokens: int
    target_seconds: float
    first: float | None = None
    last: float | None = None

    @property
    def ttft(self) -> float:
        assert self.first is not None, "it was served"
        return self.first - self.arrived

    @property
    def is_late(self) -> bool:
        return self.ttft > self.target_seconds

    @property
    def meets_objective(self) -> bool:
        if self.first is None or self.last is None:
            return False
        num_gaps = max(self.num_output_tokens - 1, 1)
        return not self.is_late and self.last - self.first <= ITL_SECONDS * num_gaps


class ClockedBench(SchedulerBench):
    """A step takes what the device's coefficients say, with a spread."""

    def __init__(
        self, plan: Plan, target_ttft_seconds: float | None, *, tells_class: bool = False
    ) -> None:
        """`tells_class`: requests have the targets of their class instead."""
        super().__init__(
            num_blocks=100_000,  # the batch is what is short
            budget=1_024,
            max_num_seqs=plan.max_num_seqs,
            tenant_cap=0.6,
            target_itl_seconds=ITL_SECONDS,
            target_ttft_seconds=target_ttft_seconds,
        )
        self._tells_class = tells_class
        self._spread = Random(7)
        self.timings: dict[str, Timing] = {}
        self.refused: list[str] = []

    def send(self, call: Call) -> None:
        self.timings[call.name] = Timing(call.seconds, call.num_output_tokens, call.ttft_seconds)
        self.manager.resident.add(call.adapter)
        try:
            self.add(
                call.name,
                call.num_prompt_tokens,
                call.num_output_tokens,
                call.adapter,
                tenant=call.tenant,
                targets=LatencyTargets(call.ttft_seconds) if self._tells_class else NO_TARGETS,
            )
        except Overloaded:
            self.refused.append(call.name)

    def step(self) -> ScheduledBatch:
        """Without the checks of a test's bench, which take longer than the step."""
        batch, _, failed = self.scheduler.schedule()
        assert batch, "something can always run"
        assert not failed, failed
        self.step_seconds = DEVICE.of(batch.shape, self._spread)
        self.now += self.step_seconds
        self.scheduler.note_launch(batch.sequences)
        self.process(batch)
        for sequence in batch.sequences:
            if sequence.draws:
                timing = self.timings[sequence.request.request_id]
                timing.first = timing.first or self.now
                timing.last = self.now
        return batch


@dataclass(frozen=True)
class Outcome:
    load: float
    arrivals: str
    target: str
    calls: list[Call]
    bench: ClockedBench
    quiet: frozenset[str] = field(default_factory=frozenset)
    """The names of the quiet tenants' requests."""

    @property
    def goodput(self) -> float:
        """Requests within the objective per second of arrivals."""
        num_met = sum(timing.meets_objective for timing in self.bench.timings.values())
        return num_met / self.calls[-1].seconds

    def attained(self, names: Sequence[str]) -> float:
        return sum(self.bench.timings[name].meets_objective for name in names) / len(names)

    def of_class(self, ttft_seconds: float) -> list[str]:
        return [call.name for call in self.calls if call.ttft_seconds == ttft_seconds]

    def as_row(self) -> Row:
        served = [timing for timing in self.bench.timings.values() if timing.first]
        ttfts = [timing.ttft for timing in served]
        names, quiet = [call.name for call in self.calls], sorted(self.quiet)
        classes = self.of_class(TTFT_SECONDS), self.of_class(LENIENT_TTFT_SECONDS)
        return {
            "load": self.load,
            "arrivals": self.arrivals,
            "target": self.target,
            "goodput, requests/s": self.goodput,
            "attained share": self.attained(names),
            "refused": len(self.bench.refused) / len(names),
            "late": sum(timing.is_late for timing in served) / len(served),
            "TTFT p50, s": percentile(ttfts, 50),
            "TTFT p99, s": percentile(ttfts, 99),
            "strict attained": self.attained(classes[0]) if classes[1] else "",
            "lenient attained": self.attained(classes[1]) if classes[1] else "",
            "quiet attained": self.attained(quiet) if quiet else "",
            "quiet refused": (
                len(self.quiet.intersection(self.bench.refused)) / len(quiet) if quiet else ""
            ),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    plan = SMOKE if parse_options(__doc__ or "", arguments).is_smoke else Plan()
    capacity = measure_capacity(plan)
    outcomes = [
        measure(plan, capacity, load, target, arrivals)
        for load in plan.loads
        for arrivals in (ARRIVALS if load == 2.0 else ("even",))
        for target in ("none", "TTFT", "class")[: 3 if arrivals.endswith("classes") else 2]
    ]
    goodput = {(o.load, o.arrivals, o.target): o.goodput for o in outcomes}
    print_report(
        "slo",
        [outcome.as_row() for outcome in outcomes],
        requests=plan.num_requests,
        capacity_requests_per_second=capacity,
        goodput_over_capacity_without_target=goodput[2.0, "even", "none"] / capacity,
        goodput_over_capacity_with_target=goodput[2.0, "even", "TTFT"] / capacity,
    )
    return 0


def make_calls(plan: Plan, num_calls: int, rate: float, arrivals: str) -> list[Call]:
    """So many arrivals, `rate` a second; lengths spread exponentially."""
    rng, now = Random(11), 0.0
    classes = Random(13)
    others = (plan.num_tenants - 1) * FLOOD if arrivals == "flood" else 1
    weights = [others, *[1] * (plan.num_tenants - 1)]
    calls = []
    for number in range(num_calls):
        now += rng.expovariate(rate)
        tenant = f"tenant{rng.choices(range(plan.num_tenants), weights)[0]}"
        adapter = AdapterKey(tenant, f"sha256:{rng.randrange(plan.num_adapters)}")
        num_prompt, num_output = (
            min(1 + int(rng.expovariate(1 / mean)), 8 * mean)
            for mean in (plan.mean_prompt_tokens, plan.mean_output_tokens)
        )
        ttft = TTFT_SECONDS
        is_lenient = classes.random() < 0.5
        if arrivals == "tenant classes":
            is_lenient = tenant in ("tenant2", "tenant3")
        if is_lenient and arrivals.endswith("classes"):
            ttft = LENIENT_TTFT_SECONDS
        calls.append(Call(f"r{number}", now, tenant, adapter, num_prompt, num_output, ttft))
    return calls


def measure_capacity(plan: Plan) -> float:
    """Requests per second while more wait than run."""
    bench = ClockedBench(plan, None)
    num_calls = plan.num_capacity_requests
    for call in make_calls(plan, num_calls + 2 * plan.max_num_seqs, 1e9, "even"):
        bench.send(call)
    while len(bench.finished) < num_calls:
        bench.step()
    return len(bench.finished) / bench.now


def measure(plan: Plan, capacity: float, load: float, target: str, arrivals: str) -> Outcome:
    """`target`: what the scheduler is told, `none`, `TTFT` (the strict class's for all) or
    `class`."""
    calls = make_calls(plan, plan.num_requests, load * capacity, arrivals)
    of_server = TTFT_SECONDS if target == "TTFT" else None
    bench, num_sent = ClockedBench(plan, of_server, tells_class=target == "class"), 0
    while num_sent < len(calls) or bench.scheduler.has_requests:
        if not bench.scheduler.has_requests:
            bench.now = max(bench.now, calls[num_sent].seconds)
        while num_sent < len(calls) and calls[num_sent].seconds <= bench.now:
            bench.send(calls[num_sent])
            num_sent += 1
        bench.step()
    quiet = frozenset(call.name for call in calls if call.tenant != "tenant0")
    return Outcome(
        load, arrivals, target, calls, bench, quiet if arrivals == "flood" else frozenset()
    )


if __name__ == "__main__":
    sys.exit(main())
