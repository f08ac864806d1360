"""What steps in flight gain over two stages of a pipeline.

    make bench-pipeline

The same greedy requests are served by one process, by two stages with one step in flight, and by
two stages with a step in flight for each. Every process has one thread. Each arm runs several
times, and its fastest counts.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
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
from loraplex.engine.execution.stage_pipeline import StagePipeline


@dataclass(frozen=True)
class Plan:
    shape: BaseShape = MEASURED_SHAPE
    num_requests: int = 64
    num_prompt_tokens: int = 16
    num_output_tokens: int = 64
    num_repeats: int = 3


SMOKE = Plan(SMOKE_SHAPE, num_requests=4, num_prompt_tokens=20, num_output_tokens=6, num_repeats=1)


@dataclass(frozen=True)
class Arm:
    name: str
    num_stages: int = 1
    num_in_flight: int = 1


ARMS = (
    Arm("one process"),
    Arm("two stages, one step in flight", num_stages=2),
    Arm("two stages, two steps in flight", num_stages=2, num_in_flight=2),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__ or "", arguments)
    plan = SMOKE if options.is_smoke else Plan()
    torch.set_num_threads(1)
    model = make_model(options.models, plan.shape)
    num_tokens = plan.num_requests * plan.num_output_tokens
    seconds, answers = {}, {}
    for arm in ARMS:
        with tempfile.TemporaryDirectory() as folder:
            seconds[arm], answers[arm] = serve(model, Path(folder), plan, arm)
    alone, serial, pipelined = (seconds[arm] for arm in ARMS)
    print_report(
        "pipeline",
        [
            {"arm": arm.name, "seconds": seconds[arm], "tokens/s": num_tokens / seconds[arm]}
            for arm in ARMS
        ],
        steps_in_flight_over_one=serial / pipelined,
        stages_over_one_process=alone / pipelined,
        requests_answered_differently=sum(
            sum(own != other for own, other in zip(answers[arm], answers[ARMS[0]], strict=True))
            for arm in ARMS[1:]
        ),
    )
    return 0


def serve(model: Path, folder: Path, plan: Plan, arm: Arm) -> tuple[float, list[list[int]]]:
    """The seconds of the fastest run, and its answers."""
    engine = TimedEngine(
        model,
        folder,
        num_threads=1,
        speculation=(),
        prefix_caching=False,
        max_num_seqs=plan.num_requests,
        kv_cache_bytes=256 << 20,
        pipeline_parallel_size=arm.num_stages,
    )
    bound_steps_in_flight(engine, arm.num_in_flight)
    rng = Random(1)
    orders = [
        Order(random_prompt(rng, plan.shape, plan.num_prompt_tokens), plan.num_output_tokens)
        for _ in range(plan.num_requests)
    ]
    engine.warm_up()
    runs = []
    for _ in range(plan.num_repeats):
        begun_at = time.perf_counter()
        ids = engine.send_all(orders)
        engine.run()
        runs.append((time.perf_counter() - begun_at, engine.tokens(ids)))
    engine.close()
    return min(runs)


def bound_steps_in_flight(engine: TimedEngine, num_steps: int) -> None:
    """Let fewer steps be in flight than there are stages, as no configuration does."""
    pipeline, scheduler = engine.core._executor._pipeline, engine.core.parts.scheduler
    if isinstance(pipeline, StagePipeline):
        pipeline._num_stages = num_steps
        scheduler.limits = replace(scheduler.limits, max_concurrent_batches=num_steps)


if __name__ == "__main__":
    sys.exit(main())
