"""Tokens per second of the same base dense and quantized: one stream, 16 requests, and prompts.

    make bench-quantized-serving

Engines of every form are open at once and take turns, round after round; figures are medians, and
ratios are to the dense base's. The base is a checkpoint in bf16, served in the dtype that the
processor computes fastest in. `one` is a request alone and `many` are 16 together: tokens per
second after the first token of the last request. `prompt` are the prompt tokens per second of one
request of 1,024 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.bench_mixed_step import SHAPES
from benchmarks.report import MODELS, Row, print_report
from benchmarks.timed_engine import (
    SMOKE_SHAPE,
    Order,
    TimedEngine,
    kv_bytes_per_token,
    make_model,
    random_prompt,
)

from loraplex.api.bench.models import BaseShape
from loraplex.engine.config import Quantization

FORMS = (Quantization.NONE, Quantization.INT8, Quantization.INT4)
FIGURES = ("one", "many", "prompt")


@dataclass(frozen=True)
class Plan:
    shape: BaseShape
    num_requests: int = 16
    num_prompt_tokens: int = 32
    num_output_tokens: int = 48
    long_prompt: int = 1024
    num_rounds: int = 3

    @property
    def kv_bytes(self) -> int:
        num_tokens = self.num_requests * (self.num_prompt_tokens + self.num_output_tokens)
        return 2 * kv_bytes_per_token(self.shape) * (num_tokens + self.long_prompt)


SMOKE = Plan(SMOKE_SHAPE, 2, 5, 4, long_prompt=20, num_rounds=1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: whether it runs")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=Path, default=MODELS, help="where the base is kept")
    options = parser.parse_args(arguments)
    plan = SMOKE if options.smoke else Plan(SHAPES[options.shape], num_rounds=options.rounds)
    options.models.mkdir(parents=True, exist_ok=True)
    model = make_model(options.models, plan.shape)
    with tempfile.TemporaryDirectory() as directory:
        engines = {form: open_engine(model, Path(directory), plan, form) for form in FORMS}
        dtype = next(iter(engines.values())).core.info.dtype
        rows = compare(engines, plan)
        for engine in engines.values():
            engine.close()
    print_report("quantized-serving", rows, dtype=dtype, rounds=plan.num_rounds)
    return 0


def open_engine(model: Path, directory: Path, plan: Plan, form: Quantization) -> TimedEngine:
    engine = TimedEngine(
        model,
        directory,
        dtype="auto",
        quantization=form,
        kv_cache_bytes=plan.kv_bytes,
        max_num_seqs=plan.num_requests,
        prefix_caching=False,
    )
    engine.warm_up((1, plan.num_requests))
    return engine


def compare(engines: Mapping[Quantization, TimedEngine], plan: Plan) -> list[Row]:
    figures: dict[Quantization, list[dict[str, float]]] = defaultdict(list)
    for number in range(plan.num_rounds):
        for form, engine in engines.items():
            figures[form].append(measure(engine, plan, Random(number)))
    medians = {
        form: {name: statistics.median(each[name] for each in rounds) for name in FIGURES}
        for form, rounds in figures.items()
    }
    return [
        {
            "weights": "dense" if form is Quantization.NONE else str(form),
            **{name: own[name] for name in FIGURES},
            **{f"{name}, ratio": own[name] / medians[Quantization.NONE][name] for name in FIGURES},
        }
        for form, own in medians.items()
    ]


def measure(engine: TimedEngine, plan: Plan, rng: Random) -> dict[str, float]:
    """Tokens per second of one round."""
    return {
        "one": decode_speed(engine, plan, 1, rng),
        "many": decode_speed(engine, plan, plan.num_requests, rng),
        "prompt": prompt_speed(engine, plan, rng),
    }


def decode_speed(engine: TimedEngine, plan: Plan, num_requests: int, rng: Random) -> float:
    """While all requests decode: prompts take other kernels."""
    orders = [
        Order(random_prompt(rng, plan.shape, plan.num_prompt_tokens), plan.num_output_tokens)
        for _ in range(num_requests)
    ]
    timings = engine.timings(_run(engine, orders))
    start = max(timing.chunks[0] for timing in timings)
    end = min(timing.chunks[-1] for timing in timings)
    num_tokens = sum(start < each <= end for timing in timings for each in timing.chunks)
    return num_tokens / (end - start)


def prompt_speed(engine: TimedEngine, plan: Plan, rng: Random) -> float:
    prompt = random_prompt(rng, plan.shape, plan.long_prompt)
    start = time.perf_counter()
    _run(engine, [Order(prompt, 1)])
    return plan.long_prompt / (time.perf_counter() - start)


def _run(engine: TimedEngine, orders: Sequence[Order]) -> list[str]:
    names = engine.send_all(orders)
    engine.run()
    return names


if __name__ == "__main__":
    raise SystemExit(main())
