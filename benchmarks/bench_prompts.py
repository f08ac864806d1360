"""The time that adapters add to a step that computes prompts, relative to the base's arithmetic.

    make bench-prompts [ARGS="--device cuda --shape 8b"]

A number of prompts is computed in one step and answered by one token each: with the base alone,
with one adapter for all, and with a separate adapter for each. The floor is the time of the base's
products at the rate that this device reaches in a large product.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
from benchmarks.bench_mixed_step import (
    ARMS,
    SHAPES,
    adapter_bytes,
    adapters_of,
    add_adapters,
    kv_bytes,
)
from benchmarks.bench_mixed_step import Plan as DecodePlan
from benchmarks.drawn_base import base_of
from benchmarks.report import MODELS, Row, print_report
from benchmarks.timed_engine import MEASURED_SHAPE, SMOKE_SHAPE, Order, TimedEngine, random_prompt

from loraplex.adapters.identity import AdapterKey
from loraplex.api.bench.models import BaseShape


@dataclass(frozen=True)
class Plan:
    shape: BaseShape = MEASURED_SHAPE
    dtype: str = "float32"
    prompts: tuple[tuple[int, int], ...] = ((1, 512), (4, 512))
    """How many together, and the tokens of each."""
    num_runs: int = 5

    @property
    def most_prompts(self) -> int:
        return max(number for number, _ in self.prompts)

    @property
    def most_tokens(self) -> int:
        """Of a step."""
        return max(number * length for number, length in self.prompts)

    @property
    def as_decoding(self) -> DecodePlan:
        """Of the same engine."""
        return DecodePlan(self.shape, self.dtype, batches=(self.most_prompts,))


SMOKE = Plan(SMOKE_SHAPE, prompts=((1, 8), (2, 8)), num_runs=2)
LARGE = ((1, 128), (1, 1_024), (1, 2_048), (8, 1_024))
"""The prompts of the large base."""
Seconds = defaultdict[tuple[int, int, str], list[float]]
"""By the number of prompts, their length and the arm."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: whether it runs")
    parser.add_argument("--models", type=Path, default=MODELS, help="where the base is kept")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default="31m")
    options = parser.parse_args(arguments)
    options.models.mkdir(parents=True, exist_ok=True)
    plan = SMOKE if options.smoke else Plan(SHAPES[options.shape])
    if options.device == "cuda":
        plan = replace(plan, dtype="bfloat16", prompts=LARGE)
    with tempfile.TemporaryDirectory() as directory:
        table, facts = compare(plan, options.models, Path(directory), device=options.device)
    print_report(
        "prompts",
        table,
        device=torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        shape="smoke" if options.smoke else options.shape,
        dtype=plan.dtype,
        **facts,
    )
    return 0


def compare(
    plan: Plan, models: Path, directory: Path, *, device: str
) -> tuple[list[Row], dict[str, object]]:
    """A row for each kind of step and arm, and what else there is to say."""
    with base_of(plan.shape, models, device=device) as model:
        engine = open_engine(plan, model, directory, device=device)
        seconds, num_different = measure(plan, engine)
    table = list(rows(plan, seconds, engine))
    engine.close()
    return table, {
        "flops_per_second": engine.matmul_rate,
        "requests_answered_differently": num_different,
    }


def open_engine(plan: Plan, model: Path, folder: Path, *, device: str) -> TimedEngine:
    decoding = plan.as_decoding
    room = int(1.05 * plan.most_prompts * adapter_bytes(decoding)) + (1 << 20)
    kv_tokens = plan.most_tokens + 32 * plan.most_prompts
    return TimedEngine(
        model,
        folder,
        device=device,
        dtype=plan.dtype,
        max_model_len=max(length for _, length in plan.prompts) + 16,
        max_num_seqs=plan.most_prompts,
        max_num_batched_tokens=plan.most_tokens + plan.most_prompts,
        kv_cache_bytes=kv_tokens * kv_bytes(decoding),
        arena_bytes=room,
        host_cache_bytes=room,
        loader_duty=8.0,
        prefix_caching=False,
    )


def measure(plan: Plan, engine: TimedEngine) -> tuple[Seconds, int]:
    """The times of every run but the first, and how many answers differ from the first run's."""
    keys = add_adapters(plan.as_decoding, engine)
    seconds: Seconds = defaultdict(list)
    first: dict[tuple[int, int, str], list[list[int]]] = {}
    num_different = 0
    for turn in range(plan.num_runs + 1):
        for number, length in plan.prompts:
            for arm in ARMS:
                step = (number, length, arm)
                taken, answers = serve(plan, engine, length, adapters_of(arm, keys, number))
                expected = first.setdefault(step, answers)
                num_different += sum(a != b for a, b in zip(answers, expected, strict=True))
                if turn:  # the first loads adapters and compiles kernels
                    seconds[step].append(taken)
    return seconds, num_different


def serve(
    plan: Plan, engine: TimedEngine, length: int, adapters: Sequence[AdapterKey | None]
) -> tuple[float, list[list[int]]]:
    """Seconds until each prompt has its first token, and these tokens."""
    rng = Random(5)
    orders = [
        Order(
            random_prompt(rng, plan.shape, length),
            1,
            adapter.tenant_id if adapter else "bench",
            adapter,
        )
        for adapter in adapters
    ]
    began = time.perf_counter()
    ids = engine.send_all(orders)
    engine.run()
    return time.perf_counter() - began, engine.tokens(ids)


def rows(plan: Plan, seconds: Seconds, engine: TimedEngine) -> Iterator[Row]:
    for number, length in plan.prompts:
        floor = engine.prompt_flops(number, length) / engine.matmul_rate
        base = statistics.median(seconds[number, length, "base"])
        for arm in ARMS:
            taken = statistics.median(seconds[number, length, arm])
            yield {
                "prompts": number,
                "tokens each": length,
                "adapters": arm,
                "ms": 1e3 * taken,
                "tokens/s": number * length / taken,
                "ratio": taken / base,
                "floor ms": 1e3 * floor,
                "over floor": taken / floor,
            }


if __name__ == "__main__":
    raise SystemExit(main())
