"""What dividing the input embedding and the output head among ranks saves in memory and in a step.

    make bench-divided-ends

The base has a large vocabulary. Two ranks, and four, hold its ends whole, in which case rank 0
alone multiplies the head, and then divided. Each rank is a process of one thread. A step decodes
one token of each of some sequences. "ms" is the fastest step of rank 0; "CPU ms" the median of the
processor time that a step takes of the busiest rank, which other programs hardly change. The bytes
are those of the rank that has most.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from benchmarks.rank_processes import rank_processes
from benchmarks.report import parse_options, print_report
from benchmarks.timed_engine import SMOKE_SHAPE, make_model
from torch._C._distributed_c10d import FileStore

from loraplex.api.bench.models import BaseShape
from loraplex.engine.config import EngineConfig
from loraplex.engine.execution.profiling import groups_of
from loraplex.engine.kv.cache import KvCache
from loraplex.engine.kv.sequence_blocks import block_table
from loraplex.engine.memory.device_memory import peak_bytes
from loraplex.engine.model import sharded_base
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.forward import PagedForward, run_decoder, run_model
from loraplex.engine.model.inputs import SequenceChunk, make_inputs
from loraplex.engine.shards.group_links import GroupLinks, connect_group
from loraplex.engine.shards.rank_place import GroupShape

LARGE_VOCABULARY = BaseShape(
    vocab_size=64_000,
    hidden_size=512,
    intermediate_size=1_408,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    seed=2,
)


@dataclass(frozen=True)
class Plan:
    shape: BaseShape = LARGE_VOCABULARY
    sizes: tuple[int, ...] = (2, 4)
    batches: tuple[int, ...] = (1, 16, 64)
    """Sequences of a step."""
    num_steps: int = 40


SMOKE = Plan(SMOKE_SHAPE, (2,), (1, 4), num_steps=2)


class StepTimes(NamedTuple):
    """In milliseconds."""

    fastest: float
    processor: float
    """The median of the processor time."""


class Measured(NamedTuple):
    """Of one rank."""

    weight_bytes: int
    peak_bytes: int
    """While it loaded."""
    steps: tuple[StepTimes, ...]
    """By batch."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__ or "", arguments)
    plan = SMOKE if options.is_smoke else Plan()
    model = make_model(options.models / "large-vocabulary", plan.shape)
    rows = []
    for size in plan.sizes:
        for is_divided in (False, True):
            of_ranks = measure(model, size, plan, is_divided=is_divided)
            times = {}
            for place, batch in enumerate(plan.batches):
                of_batch = [each.steps[place] for each in of_ranks]
                times[f"ms, batch {batch}"] = of_batch[0].fastest
                times[f"CPU ms, batch {batch}"] = max(each.processor for each in of_batch)
            rows.append(
                {
                    "ranks": size,
                    "ends": "divided" if is_divided else "whole",
                    "weights MB": max(each.weight_bytes for each in of_ranks) / 1e6,
                    "load peak MB": max(each.peak_bytes for each in of_ranks) / 1e6,
                    **times,
                }
            )
    print_report("divided-ends", rows)
    return 0


def measure(model: Path, size: int, plan: Plan, *, is_divided: bool) -> list[Measured]:
    """By rank."""
    with tempfile.TemporaryDirectory() as folder, rank_processes().Pool(size) as pool:
        jobs = [
            pool.apply_async(measure_rank, (model, f"{folder}/store", rank, size, plan, is_divided))
            for rank in range(size)
        ]
        return [job.get(600) for job in jobs]


def measure_rank(
    model: Path, store: str, rank: int, size: int, plan: Plan, is_divided: bool
) -> Measured:
    torch.set_num_threads(1)
    links = connect_group(FileStore(store, size), GroupShape(size, 1), rank, torch.device("cpu"))
    loaded: list[BaseModel] = []
    config = EngineConfig(str(model), device="cpu", dtype="float32")
    peak = peak_bytes(
        torch.device("cpu"), lambda: loaded.append(load(config, links, is_divided=is_divided))
    )
    (base,) = loaded
    times = tuple(time_steps(config, base, links, batch, plan.num_steps) for batch in plan.batches)
    return Measured(base.weight_bytes, peak, times)


def load(config: EngineConfig, links: GroupLinks, *, is_divided: bool) -> BaseModel:
    if is_divided:
        return sharded_base.load_sharded_base(config, links)
    with patch.object(sharded_base, "plan_vocabulary", lambda *_: ()):
        return sharded_base.load_sharded_base(config, links)


def time_steps(
    config: EngineConfig, base: BaseModel, links: GroupLinks, batch: int, num_steps: int
) -> StepTimes:
    """Of steps after one that warms up."""
    groups, size = groups_of(config, base), config.kv_block_size
    cache = KvCache(
        groups, base.kv_shapes, block_size=size, kv_format=base.kv_format, device=base.device
    )
    tables = [block_table([1])] * len(groups)
    chunks = [SequenceChunk([7 + number], 1, tables) for number in range(batch)]
    inputs = make_inputs(chunks, groups=cache.groups, block_size=size, device=base.device)
    forward = PagedForward.of(cache, inputs)
    has_logits = links.sums.place.rank == 0 or base.ends.is_head_divided
    walls, processor = [], []
    for _ in range(num_steps + 1):
        links.sums.gather(torch.zeros(1))  # a step begins on all ranks
        begun_at, used = time.perf_counter(), time.process_time()
        if has_logits:
            ids, positions = inputs.input_ids, inputs.positions
            run_model(base.model, forward, ids, positions, inputs.logits_rows)
        else:
            run_decoder(base.model, forward, inputs.input_ids, inputs.positions)
        processor.append(1e3 * (time.process_time() - used))
        walls.append(1e3 * (time.perf_counter() - begun_at))
    return StepTimes(min(walls[1:]), statistics.median(processor[1:]))


if __name__ == "__main__":
    sys.exit(main())
