"""The tradeoff between throughput and latency that `--target-itl` controls.

    make bench-target-itl

Each of a fixed number of clients sends its next request as soon as it is answered, so that prompts
keep arriving among decodes. The targets are multiples of the duration of a decode-only step, which
is measured first: no scheduler can be faster.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.report import parse_options, print_report
from benchmarks.timed_engine import (
    MEASURED_SHAPE,
    SMOKE_SHAPE,
    Order,
    TimedEngine,
    make_model,
    random_prompt,
)

from loraplex.api.bench.models import BaseShape
from loraplex.api.bench.summary import RequestTiming, percentile


@dataclass(frozen=True)
class Plan:
    shape: BaseShape = MEASURED_SHAPE
    multiples: tuple[float | None, ...] = (None, 8.0, 4.0, 2.0, 1.5)
    """Targets as multiples of a decoding step; None: no target."""
    num_clients: int = 12
    num_requests: int = 60
    num_prompt_tokens: int = 300
    num_output_tokens: int = 48


SMOKE = Plan(
    SMOKE_SHAPE,
    multiples=(None, 2.0),
    num_clients=3,
    num_requests=8,
    num_prompt_tokens=60,
    num_output_tokens=6,
)


@dataclass(frozen=True)
class Outcome:
    """One target's run."""

    target_ms: float | None
    seconds: float
    timings: list[RequestTiming]
    answers: list[list[int]]

    def as_row(self) -> dict[str, object]:
        ttft = [1_000 * timing.ttft_seconds for timing in self.timings]
        gaps = [1_000 * gap for timing in self.timings for gap in timing.itl_seconds]
        num_tokens = sum(timing.output_tokens for timing in self.timings)
        return {
            "target ITL, ms": self.target_ms or "none",
            "output tokens/s": num_tokens / self.seconds,
            **{f"ITL p{percent}, ms": percentile(gaps, percent) for percent in (50, 95, 99)},
            **{f"TTFT p{percent}, ms": percentile(ttft, percent) for percent in (50, 95)},
        }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__ or "", arguments)
    plan = SMOKE if options.is_smoke else Plan()
    model = make_model(options.models, plan.shape)
    decode_ms = 1_000 * decode_step_seconds(model, plan)
    outcomes = [
        measure(model, plan, None if multiple is None else multiple * decode_ms)
        for multiple in plan.multiples
    ]
    print_report(
        "target-itl",
        [outcome.as_row() for outcome in outcomes],
        clients=plan.num_clients,
        prompt_tokens=plan.num_prompt_tokens,
        output_tokens=plan.num_output_tokens,
        decode_step_ms=decode_ms,
        requests_answered_differently=max(
            sum(a != b for a, b in zip(outcome.answers, outcomes[0].answers, strict=True))
            for outcome in outcomes
        ),
    )
    return 0


def make_engine(model: Path, directory: str, plan: Plan, target_ms: float | None) -> TimedEngine:
    engine = TimedEngine(
        model,
        Path(directory),
        max_num_seqs=plan.num_clients,
        kv_cache_bytes=256 << 20,
        prefix_caching=False,
        target_itl_ms=target_ms,
    )
    engine.warm_up((1, plan.num_clients))
    return engine


def make_orders(plan: Plan, seed: int, count: int) -> list[Order]:
    rng = Random(seed)
    return [
        Order(random_prompt(rng, plan.shape, plan.num_prompt_tokens), plan.num_output_tokens)
        for _ in range(count)
    ]


def decode_step_seconds(model: Path, plan: Plan) -> float:
    """The median step in which every client decodes and no prompt is computed."""
    with tempfile.TemporaryDirectory() as directory:
        engine = make_engine(model, directory, plan, None)
        ids = engine.send_all(make_orders(plan, 0, plan.num_clients))
        while any(not engine.answers[request_id].token_ids for request_id in ids):
            engine.step()
        seconds = []
        while engine.num_open == plan.num_clients:
            began = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - began)
        engine.run()
        engine.close()
    return statistics.median(seconds)


def measure(model: Path, plan: Plan, target_ms: float | None) -> Outcome:
    orders = make_orders(plan, 1, plan.num_requests)
    with tempfile.TemporaryDirectory() as directory:
        engine = make_engine(model, directory, plan, target_ms)
        # The engine learns here what its steps cost, as one that serves has long done.
        serve(engine, make_orders(plan, 2, plan.num_clients), plan.num_clients)
        began = time.perf_counter()
        ids = serve(engine, orders, plan.num_clients)
        seconds = time.perf_counter() - began
        outcome = Outcome(target_ms, seconds, engine.timings(ids), engine.tokens(ids))
        engine.close()
    return outcome


def serve(engine: TimedEngine, orders: Sequence[Order], num_clients: int) -> list[str]:
    """All orders, `num_clients` of them open at a time."""
    ids: list[str] = []
    while len(ids) < len(orders) or engine.num_open:
        room = num_clients - engine.num_open
        ids += engine.send_all(orders[len(ids) : len(ids) + room])
        engine.step()
    return ids


if __name__ == "__main__":
    sys.exit(main())
