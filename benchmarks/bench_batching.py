"""Continuous and static batching: tokens per second on one trace of mixed lengths.

    make bench-batching

Static: a batch is submitted as a whole, and all of it ends before the next one starts; it still
profits from this engine, which computes no token twice and none for ended requests. Padded: static
batching without such an engine, where each prompt and each output is as long as the longest in the
batch; only requested tokens count. Published ratios: 2 to 20.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
    variable_length_trace,
)

from loraplex.api.bench.models import BaseShape


@dataclass(frozen=True)
class Plan:
    shape: BaseShape = MEASURED_SHAPE
    num_requests: int = 160
    batch_size: int = 16
    mean_prompt_tokens: int = 100
    mean_output_tokens: int = 80


SMOKE = Plan(SMOKE_SHAPE, num_requests=9, batch_size=3, mean_prompt_tokens=9, mean_output_tokens=5)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__ or "", arguments)
    plan = SMOKE if options.is_smoke else Plan()
    model = make_model(options.models, plan.shape)
    trace = make_trace(plan)
    with tempfile.TemporaryDirectory() as directory:
        engine = TimedEngine(
            model,
            Path(directory),
            max_num_seqs=plan.batch_size,
            kv_cache_bytes=512 << 20,
            prefix_caching=False,
        )
        engine.warm_up()
        arms = {
            "continuous": measure(lambda: run_continuous(engine, trace)),
            "static": measure(lambda: run_static(engine, trace, plan.batch_size)),
            "static, padded": measure(lambda: run_padded(engine, trace, plan)),
        }
        engine.close()
    num_tokens = sum(order.num_output_tokens for order in trace)
    speed = {name: num_tokens / seconds for name, (_, seconds) in arms.items()}
    print_report(
        "batching",
        [
            {
                "batching": name,
                "seconds": seconds,
                "output tokens/s": speed[name],
                "continuous is faster by": speed["continuous"] / speed[name],
            }
            for name, (_, seconds) in arms.items()
        ],
        requests=len(trace),
        batch_size=plan.batch_size,
        output_tokens=num_tokens,
        continuous_over_static=speed["continuous"] / speed["static"],
        continuous_over_padded=speed["continuous"] / speed["static, padded"],
        requests_answered_differently=count_differences(arms["continuous"][0], arms["static"][0]),
    )
    return 0


def make_trace(plan: Plan) -> list[Order]:
    return variable_length_trace(
        Random(1),
        plan.shape,
        plan.num_requests,
        mean_prompt_tokens=plan.mean_prompt_tokens,
        mean_output_tokens=plan.mean_output_tokens,
        max_tokens=plan.shape.max_model_len // 2,
    )


def measure(run: Callable[[], list[list[int]]]) -> tuple[list[list[int]], float]:
    """The answers and the seconds they took."""
    began = time.perf_counter()
    return run(), time.perf_counter() - began


def run_continuous(engine: TimedEngine, trace: Sequence[Order]) -> list[list[int]]:
    ids = engine.send_all(trace)
    engine.run()
    return engine.tokens(ids)


def run_static(engine: TimedEngine, trace: Sequence[Order], size: int) -> list[list[int]]:
    return [answer for batch in batches(trace, size) for answer in run_continuous(engine, batch)]


def run_padded(engine: TimedEngine, trace: Sequence[Order], plan: Plan) -> list[list[int]]:
    rng = Random(2)
    return [
        answer
        for batch in batches(trace, plan.batch_size)
        for answer in run_continuous(engine, pad(batch, rng, plan.shape))
    ]


def pad(batch: Sequence[Order], rng: Random, shape: BaseShape) -> list[Order]:
    """All as long as the longest prompt and the longest output of the batch."""
    num_prompt = max(len(order.prompt) for order in batch)
    num_output = max(order.num_output_tokens for order in batch)
    return [
        Order(random_prompt(rng, shape, num_prompt - len(order.prompt)) + order.prompt, num_output)
        for order in batch
    ]


def batches(trace: Sequence[Order], size: int) -> Iterator[Sequence[Order]]:
    return (trace[start : start + size] for start in range(0, len(trace), size))


def count_differences(left: Sequence[list[int]], right: Sequence[list[int]]) -> int:
    """Rounding may decide between tokens as good as equal, so a few in a long run are no fault."""
    return sum(a != b for a, b in zip(left, right, strict=True))


if __name__ == "__main__":
    sys.exit(main())
