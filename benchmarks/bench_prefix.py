"""TTFT after a shared prompt of 1,000 tokens, with and without the prefix cache.

    make bench-prefix

Every request is the shared prompt and its own question. One at a time shows the latency of a single
user; all at once shows the gain on a busy device. Published: 5 to 10 times.

From the host: prompts of 2,000 tokens, of which the device holds one. Each comes again after all
others, when host memory alone has it.

From the disk: the same prompts on a restarted engine, of which the disk alone has them.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from benchmarks.report import parse_options, print_report
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


@dataclass(frozen=True)
class Plan:
    shape: BaseShape = MEASURED_SHAPE
    num_shared_tokens: int = 1_000
    num_own_tokens: int = 24
    num_output_tokens: int = 8
    num_requests: int = 24
    num_at_once: int = 8
    num_host_tokens: int = 2_000
    num_host_prompts: int = 8


SMOKE = Plan(
    SMOKE_SHAPE,
    num_shared_tokens=100,
    num_own_tokens=5,
    num_requests=4,
    num_at_once=2,
    num_host_tokens=200,
    num_host_prompts=3,
)


@dataclass(frozen=True)
class Outcome:
    """One kind of load on one engine."""

    ttft_seconds: float
    """The median."""
    num_cached_tokens: list[int]
    answers: list[list[int]]


@dataclass(frozen=True)
class HostOutcome:
    """Prompts that were computed, and the same ones again."""

    computed: Outcome
    copied: Outcome
    num_copied_tokens: int
    """All that came from the host."""
    read: Outcome
    """On a restarted engine, which read them from the disk."""
    num_read_blocks: int


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__ or "", arguments)
    plan = SMOKE if options.is_smoke else Plan()
    model = make_model(options.models, plan.shape)
    without, cached = (
        measure(model, plan, prefix_caching=prefix_caching) for prefix_caching in (False, True)
    )
    host = measure_host(plan, options.models)
    without["from the host"], cached["from the host"] = host.computed, host.copied
    without["from the disk"], cached["from the disk"] = host.computed, host.read
    rows = [
        {
            "requests": name,
            "without, ms": 1_000 * without[name].ttft_seconds,
            "with cache, ms": 1_000 * cached[name].ttft_seconds,
            "ratio": without[name].ttft_seconds / cached[name].ttft_seconds,
        }
        for name in without
    ]
    print_report(
        "prefix",
        rows,
        shared_tokens=plan.num_shared_tokens,
        own_tokens=plan.num_own_tokens,
        host_prompt_tokens=plan.num_host_tokens,
        tokens_from_host=host.num_copied_tokens,
        blocks_from_disk=host.num_read_blocks,
        cached_tokens_without=max(max(run.num_cached_tokens) for run in without.values()),
        cached_tokens_with=min(min(run.num_cached_tokens) for run in cached.values()),
        ttft_ratio=rows[0]["ratio"],
        host_ttft_ratio=rows[-2]["ratio"],
        disk_ttft_ratio=rows[-1]["ratio"],
        requests_answered_differently=sum(
            a != b
            for name in without
            for a, b in zip(without[name].answers, cached[name].answers, strict=True)
        ),
    )
    return 0


def measure(model: Path, plan: Plan, *, prefix_caching: bool) -> dict[str, Outcome]:
    rng = Random(1)
    shared = random_prompt(rng, plan.shape, plan.num_shared_tokens)
    orders = [
        Order(shared + random_prompt(rng, plan.shape, plan.num_own_tokens), plan.num_output_tokens)
        for _ in range(2 * plan.num_requests)
    ]
    one_by_one, at_once = orders[: plan.num_requests], orders[plan.num_requests :]
    with tempfile.TemporaryDirectory() as directory:
        engine = TimedEngine(
            model,
            Path(directory),
            prefix_caching=prefix_caching,
            max_num_seqs=plan.num_at_once,
            kv_cache_bytes=512 << 20,
        )
        engine.warm_up()
        # Fills the cache, where there is one, and shows both engines such a prompt once.
        serve(engine, [Order(shared, 1)], 1)
        outcomes = {
            "one at a time": serve(engine, one_by_one, 1),
            f"{plan.num_at_once} at once": serve(engine, at_once, plan.num_at_once),
        }
        engine.close()
    return outcomes


def measure_host(plan: Plan, models: Path) -> HostOutcome:
    """The same prompts twice, on an engine that holds one of them beside a request, and once more
    after a restart."""
    rng, length = Random(2), plan.num_host_tokens
    shape = replace(plan.shape, max_model_len=length + 256)
    orders = [
        Order(random_prompt(rng, shape, length), plan.num_output_tokens)
        for _ in range(plan.num_host_prompts)
    ]
    prompt_bytes = length * kv_bytes_per_token(shape)
    with tempfile.TemporaryDirectory() as directory:
        config = {
            "max_num_seqs": 1,
            "kv_cache_bytes": 2 * prompt_bytes,
            "swap_bytes": 3 * plan.num_host_prompts * prompt_bytes,
            "prefix_disk_bytes": 3 * plan.num_host_prompts * prompt_bytes,
            "prefix_disk_dir": f"{directory}/prefixes",
            "prefix_key": bytes(32),
        }
        model = make_model(models / "long", shape)
        engine = TimedEngine(model, Path(directory), **config)
        engine.warm_up()
        computed = serve(engine, orders, 1)
        before = engine.core.stats().num_host_cached_tokens
        copied = serve(engine, orders, 1)
        num_copied_tokens = engine.core.stats().num_host_cached_tokens - before
        engine.close()
        engine = TimedEngine(model, Path(directory), **config)
        engine.warm_up()
        read = serve(engine, orders, 1)
        num_read_blocks = engine.core.stats().num_blocks_from_disk
        engine.close()
    return HostOutcome(computed, copied, num_copied_tokens, read, num_read_blocks)


def serve(engine: TimedEngine, orders: Sequence[Order], num_at_once: int) -> Outcome:
    ids: list[str] = []
    for start in range(0, len(orders), num_at_once):
        ids += engine.send_all(orders[start : start + num_at_once])
        engine.run()
    started = [engine.answers[request_id].started for request_id in ids]
    return Outcome(
        statistics.median(timing.ttft_seconds for timing in engine.timings(ids)),
        [event.num_cached_tokens for event in started if event is not None],
        engine.tokens(ids),
    )


if __name__ == "__main__":
    sys.exit(main())
