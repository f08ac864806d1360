"""TTFT of a well-behaved tenant while another tenant floods every replica of a fleet.

    make bench-fleet-fairness          ARGS=--smoke: tiny sizes, only checks that it runs

Four real engines, each with its own counters of service, behind the routers of two API servers.
The engines step in turn, and TTFT is counted in steps, so the figures do not depend on the machine.
The victim sends one short request after another for its adapter. Equal: beside tenants of equal
share, each of which keeps as many requests open as the fleet runs at once. Flood: one of them keeps
ten times as many open. The bar for p99 is 1.5 times the equal case.

The routers see the tenants' adapters by name; the engines answer with the base, because the
question is whose request is next and not how adapters are loaded.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from random import Random

from benchmarks.report import Row, parse_options, print_report
from benchmarks.timed_engine import (
    SMOKE_SHAPE,
    Order,
    TimedEngine,
    kv_bytes_per_token,
    make_model,
    random_prompt,
)

from loraplex.api.bench.summary import percentile
from loraplex.engine.fleet.rendezvous import RendezvousOrder
from loraplex.engine.fleet.replica_state import ReplicaState, ReplicaStats
from loraplex.engine.fleet.router import RoutedRequest, Router

VICTIM = "victim"
NUM_ROUTERS = 2


@dataclass(frozen=True)
class Plan:
    num_replicas: int = 4
    max_num_seqs: int = 16
    num_victim_requests: int = 400
    num_peers: int = 3
    adapters_per_peer: int = 4
    flood_factor: int = 10
    num_prompt_tokens: int = 64
    num_victim_outputs: int = 6
    num_outputs: int = 48
    num_fill_steps: int = 120
    """Before the victim's first request: for the others to take what there is."""
    max_pause_steps: int = 8
    """Between the victim's requests."""
    num_report_steps: int = 40
    """Between two reports of a replica: half a second of a large base's steps."""
    num_kv_tokens: int = 2_560
    """Room for a full batch."""


SMOKE = Plan(num_victim_requests=4, num_fill_steps=10, flood_factor=2, num_outputs=8)


class Fleet:
    """The replicas by name, and what each API server's router has open there."""

    def __init__(
        self, engines: dict[str, TimedEngine], max_batch: int, num_report_steps: int
    ) -> None:
        self._engines = engines
        self._max_batch = max_batch
        self._num_report_steps = num_report_steps
        order = RendezvousOrder(engines)
        self._routers = [Router(order) for _ in range(NUM_ROUTERS)]
        self._turns = cycle(self._routers)
        self._numbers = count()
        self._names: dict[str, set[str]] = {name: set() for name in engines}
        self._open: dict[str, tuple[Router, str, str, str]] = {}
        self.num_open: Counter[str] = Counter()
        self.num_steps = 0
        for router in self._routers:
            for name in engines:
                router.set_state(name, ReplicaState.READY)
        self._report()

    def send(self, order: Order, adapter: str) -> str:
        """Returns the request's id."""
        request_id = str(next(self._numbers))
        router = next(self._turns)
        request = RoutedRequest(request_id, adapter)
        name = router.choose(request)
        router.open(request, name)
        self._names[name].add(adapter)
        answer_id = self._engines[name].send(order)
        self._open[request_id] = router, name, answer_id, order.tenant_id
        self.num_open[order.tenant_id] += 1
        return request_id

    def step(self) -> None:
        """Every replica makes a step."""
        for engine in self._engines.values():
            engine.step()
        self.num_steps += 1
        for request_id, (router, name, answer_id, tenant) in list(self._open.items()):
            if not self._engines[name].is_open(answer_id):
                router.close(request_id)
                del self._open[request_id]
                self.num_open[tenant] -= 1
        if self.num_steps % self._num_report_steps == 0:
            self._report()

    def is_started(self, request_id: str) -> bool:
        if request_id not in self._open:
            return True
        _, name, answer_id, _ = self._open[request_id]
        return bool(self._engines[name].answers[answer_id].token_ids)

    def is_open(self, request_id: str) -> bool:
        return request_id in self._open

    def num_waiting(self) -> list[int]:
        """On each replica."""
        return [engine.num_waiting for engine in self._engines.values()]

    def _report(self) -> None:
        for name, engine in self._engines.items():
            num_requests = engine.num_running + engine.num_waiting
            stats = ReplicaStats(num_requests, self._max_batch, self._names[name])
            for router in self._routers:
                router.report(name, stats)


@dataclass(frozen=True)
class Outcome:
    """A scenario as the victim met it."""

    name: str
    ttft_steps: list[int]
    num_waiting: list[int]
    """On each replica, at the end."""

    def ttft(self, percent: float) -> float:
        return percentile(self.ttft_steps, percent)

    def as_row(self, equal: Outcome) -> Row:
        return {
            "victim beside": self.name,
            "TTFT p50, steps": self.ttft(50),
            "TTFT p99, steps": self.ttft(99),
            "p99 over equal": self.ttft(99) / equal.ttft(99),
            "least waiting on a replica": min(self.num_waiting),
            "mean waiting": statistics.fmean(self.num_waiting),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__ or "", arguments)
    plan = SMOKE if options.is_smoke else Plan()
    model = make_model(options.models, SMOKE_SHAPE)
    equal = meet(model, plan, "equal shares", 1)
    flood = meet(model, plan, f"{plan.flood_factor} x flood", plan.flood_factor)
    print_report(
        "fleet-fairness",
        [outcome.as_row(equal) for outcome in (equal, flood)],
        replicas=plan.num_replicas,
        victim_requests=plan.num_victim_requests,
        flood_p99_over_equal=flood.ttft(99) / equal.ttft(99),
    )
    return 0


def meet(model: Path, plan: Plan, name: str, flood_factor: int) -> Outcome:
    """Let the peers fill the fleet, then the victim ask one question after another."""
    rng = Random(1)
    with ExitStack() as stack:
        fleet = Fleet(
            {
                f"replica-{number}": make_engine(model, stack, plan)
                for number in range(plan.num_replicas)
            },
            plan.max_num_seqs,
            plan.num_report_steps,
        )

        def step() -> None:
            for peer in range(plan.num_peers):
                tenant = f"peer-{peer}"
                wanted = plan.max_num_seqs * plan.num_replicas * (flood_factor if not peer else 1)
                while fleet.num_open[tenant] < wanted:
                    prompt = random_prompt(rng, SMOKE_SHAPE, plan.num_prompt_tokens)
                    adapter = f"{tenant}-{rng.randrange(plan.adapters_per_peer)}"
                    fleet.send(Order(prompt, plan.num_outputs, tenant), adapter)
            fleet.step()

        for _ in range(plan.num_fill_steps):
            step()
        waits = []
        for _ in range(plan.num_victim_requests):
            prompt = random_prompt(rng, SMOKE_SHAPE, plan.num_prompt_tokens)
            sent_at = fleet.num_steps
            request_id = fleet.send(Order(prompt, plan.num_victim_outputs, VICTIM), VICTIM)
            while not fleet.is_started(request_id):
                step()
            waits.append(fleet.num_steps - sent_at)
            while fleet.is_open(request_id):
                step()
            for _ in range(rng.randrange(plan.max_pause_steps)):
                step()
        return Outcome(name, waits, fleet.num_waiting())


def make_engine(model: Path, stack: ExitStack, plan: Plan) -> TimedEngine:
    return TimedEngine(
        model,
        Path(stack.enter_context(tempfile.TemporaryDirectory())),
        max_num_seqs=plan.max_num_seqs,
        kv_cache_bytes=plan.num_kv_tokens * kv_bytes_per_token(SMOKE_SHAPE),
        prefix_caching=False,
    )


if __name__ == "__main__":
    sys.exit(main())
