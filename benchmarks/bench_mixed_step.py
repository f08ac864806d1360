"""The time that adapters add to a decode step of the real engine, relative to the bytes they add.

    make bench-mixed-step [ARGS="--device cuda --shape 8b --quantization int8"]

A full batch decodes: with the base alone, with one adapter for all sequences, with a separate
adapter for each sequence, with separate ones of which the first changes lm_head too, and with
separate ones of which the first changes lm_head and uses DoRA. A step must read the base's weights,
the batch's KV and every adapter in it once: the ratio of these bytes is the bar, and the ratio of
times is printed next to it. The last variant's step over that with separate adapters is printed
too. On CUDA each variant runs with captured graphs and eagerly, a quantized base with graphs only;
variants alternate. Adapters of different tenants have the same values at different addresses. The
largest shape's weights are generated on the device; the others are loaded from a checkpoint.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random

import torch
from benchmarks.drawn_base import LARGE_SHAPE, base_of
from benchmarks.report import MODELS, Row, print_report
from benchmarks.timed_engine import (
    MEASURED_SHAPE,
    SMOKE_SHAPE,
    Order,
    TimedEngine,
    random_prompt,
)

from loraplex.adapters.identity import AdapterKey
from loraplex.api.bench.models import BaseShape, make_adapter
from loraplex.engine.config import Quantization
from support.greedy import parts_at_near_tie

NEAR_TIES = {"float32": 1e-3, "bfloat16": 0.1}
"""Logit gaps that rounding may cross: logits of this size are 1/32 apart in bf16."""
DISTINCT, WITH_HEAD, WITH_DORA = "all distinct", "one with lm_head", "one with lm_head and DoRA"
HEAD_ARMS = (WITH_HEAD, WITH_DORA)
"""The arms whose first sequence has an adapter of its own kind."""
ARMS = ("base", "one adapter", DISTINCT, *HEAD_ARMS)
RANK = 16
SHAPES = {
    "31m": MEASURED_SHAPE,
    "1b": BaseShape(
        hidden_size=2_048,
        intermediate_size=5_632,
        num_layers=22,
        num_heads=32,
        num_kv_heads=4,
        max_model_len=2_048,
    ),
    "8b": LARGE_SHAPE,
}


@dataclass(frozen=True)
class Plan:
    shape: BaseShape = MEASURED_SHAPE
    dtype: str = "float32"
    quantization: Quantization = Quantization.NONE
    batches: tuple[int, ...] = (1, 8, 32)
    num_prompt_tokens: int = 64
    num_output_tokens: int = 40
    num_runs: int = 3


SMOKE = Plan(SMOKE_SHAPE, batches=(1, 2), num_prompt_tokens=4, num_output_tokens=4, num_runs=1)
Gaps = defaultdict[tuple[str, int, str], list[float]]
"""By mode, batch and arm: seconds between a sequence's tokens, each sequence's median."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: whether it runs")
    parser.add_argument("--models", type=Path, default=MODELS, help="where the base is kept")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default="31m")
    parser.add_argument(
        "--quantization", type=Quantization, choices=list(Quantization), default=Quantization.NONE
    )
    options = parser.parse_args(arguments)
    options.models.mkdir(parents=True, exist_ok=True)
    plan = SMOKE if options.smoke else Plan(SHAPES[options.shape])
    plan = replace(plan, quantization=options.quantization)
    if options.device == "cuda":
        plan = replace(plan, dtype="bfloat16")
    with tempfile.TemporaryDirectory() as directory:
        table, facts = compare(plan, options.models, Path(directory), device=options.device)
    print_report(
        "mixed-step",
        table,
        device=torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        shape="smoke" if options.smoke else options.shape,
        dtype=plan.dtype,
        quantization=plan.quantization,
        **facts,
    )
    return 0


def compare(
    plan: Plan, models: Path, directory: Path, *, device: str
) -> tuple[list[Row], dict[str, object]]:
    """A row for each mode, batch and arm, and what else there is to say."""
    modes = modes_of(plan, device)
    with base_of(plan.shape, models, device=device) as model:
        engines = {
            mode: open_engine(
                plan, model, directory / mode, device=device, is_eager=mode == "eager"
            )
            for mode in modes
        }
        gaps, num_different = measure(plan, engines)
    first = engines[modes[0]]
    weight_bytes = first.weight_bytes
    bandwidth = first.copy_bandwidth
    table = [row for mode in modes for row in rows(plan, gaps, mode, weight_bytes, bandwidth)]
    facts = {
        "requests_answered_differently": num_different,
        "dora_over_all_distinct": {mode: dora_ratio(plan, gaps, mode) for mode in modes},
        "weight_bytes": weight_bytes,
        "memory_plan": first.core.info.memory_plan,
    }
    for engine in engines.values():
        engine.close()
    return table, facts


def modes_of(plan: Plan, device: str) -> list[str]:
    if device != "cuda":
        return ["eager"]
    return ["graphs"] if plan.quantization is not Quantization.NONE else ["graphs", "eager"]


def open_engine(
    plan: Plan, model: Path, folder: Path, *, device: str, is_eager: bool
) -> TimedEngine:
    folder.mkdir()
    num_adapters = max(plan.batches) + len(HEAD_ARMS)
    ends = 2 * head_bytes(plan) + vector_bytes(plan)
    room = int(1.05 * num_adapters * adapter_bytes(plan)) + ends + (1 << 20)
    kv_tokens = max(plan.batches) * (plan.num_prompt_tokens + plan.num_output_tokens + 32)
    return TimedEngine(
        model,
        folder,
        device=device,
        dtype=plan.dtype,
        quantization=plan.quantization,
        enforce_eager=is_eager,
        max_model_len=plan.num_prompt_tokens + plan.num_output_tokens + 16,
        max_num_seqs=max(plan.batches),
        kv_cache_bytes=kv_tokens * kv_bytes(plan),
        arena_bytes=room,
        host_cache_bytes=room,
        loader_duty=8.0,
    )


def measure(plan: Plan, engines: dict[str, TimedEngine]) -> tuple[Gaps, int]:
    """The gaps of every run but the first, and how many answers differ between engines."""
    keys = {mode: add_adapters(plan, engine) for mode, engine in engines.items()}
    gaps: Gaps = defaultdict(list)
    num_different = 0
    rng = Random(3)
    prompts = [
        random_prompt(rng, plan.shape, plan.num_prompt_tokens) for _ in range(max(plan.batches))
    ]
    for turn in range(plan.num_runs + 1):
        for batch in plan.batches:
            for arm in ARMS:
                answers = []
                for mode, engine in engines.items():
                    adapters = adapters_of(arm, keys[mode], batch)
                    seconds, tokens = serve(plan, engine, prompts, adapters)
                    answers.append(tokens)
                    if turn:  # the first loads adapters and compiles kernels
                        gaps[mode, batch, arm].append(seconds)
                told = zip(prompts, adapters, zip(*answers, strict=True), strict=False)
                num_different += sum(_differ(plan, engine, *each) for each in told)
    return gaps, num_different


def _differ(
    plan: Plan,
    engine: TimedEngine,
    prompt: list[int],
    adapter: AdapterKey | None,
    answers: Sequence[list[int]],
) -> bool:
    """Whether a request's answers part where `engine` finds no two tokens as good as equal."""
    first = answers[0]
    return any(
        other != first
        and not parts_at_near_tie(
            engine, prompt, adapter, expected=first, actual=other, gap=NEAR_TIES[plan.dtype]
        )
        for other in answers[1:]
    )


def add_adapters(plan: Plan, engine: TimedEngine) -> list[AdapterKey]:
    """One adapter, pushed by as many tenants as sequences decode together; last, one for each of
    HEAD_ARMS."""
    folder = engine.blocks / "adapter"
    make_adapter(folder, plan.shape, rank=RANK, seed=1)
    first = engine.add_adapter(folder, "tenant-0")
    keys = [AdapterKey(f"tenant-{i}", first.digest) for i in range(max(plan.batches))]
    engine.paths.update(dict.fromkeys(keys, engine.paths[first]))
    for seed, arm in enumerate(HEAD_ARMS, start=2):
        folder, uses_dora = engine.blocks / f"head-{seed}", arm == WITH_DORA
        make_adapter(
            folder, plan.shape, rank=RANK, seed=seed, changes_head=True, uses_dora=uses_dora
        )
        keys.append(engine.add_adapter(folder, "tenant-0"))
    return keys


def adapters_of(arm: str, keys: Sequence[AdapterKey], batch: int) -> list[AdapterKey | None]:
    """Each sequence's."""
    match arm:
        case "base":
            return [None] * batch
        case "one adapter":
            return [keys[0]] * batch
        case "all distinct":
            return list(keys[:batch])
    return [keys[HEAD_ARMS.index(arm) - len(HEAD_ARMS)], *keys[1:batch]]


def serve(
    plan: Plan,
    engine: TimedEngine,
    prompts: Sequence[list[int]],
    adapters: Sequence[AdapterKey | None],
) -> tuple[float, list[list[int]]]:
    """The median gap between a sequence's tokens, median over sequences, and all tokens."""
    ids = [
        engine.send(
            Order(
                prompt, plan.num_output_tokens, adapter.tenant_id if adapter else "bench", adapter
            )
        )
        for prompt, adapter in zip(prompts, adapters, strict=False)
    ]
    engine.run()
    gaps = [statistics.median(_gaps(timing.chunks)) for timing in engine.timings(ids)]
    return statistics.median(gaps), engine.tokens(ids)


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def rows(plan: Plan, gaps: Gaps, mode: str, weight_bytes: int, bandwidth: float) -> Iterator[Row]:
    """`bandwidth`: bytes per second that the device reached in a large copy."""
    for batch in plan.batches:
        base = statistics.median(gaps[mode, batch, "base"])
        for arm in ARMS:
            seconds = statistics.median(gaps[mode, batch, arm])
            base_bytes = weight_bytes + read_bytes(plan, "base", batch)
            num_bytes = weight_bytes + read_bytes(plan, arm, batch)
            bar = num_bytes / base_bytes
            yield {
                "mode": mode,
                "batch": batch,
                "adapters": arm,
                "step ms": 1e3 * seconds,
                "tokens/s": batch / seconds,
                "ratio": seconds / base,
                "bytes ratio": bar,
                "over bytes": seconds / base / bar,
                "of bandwidth": num_bytes / seconds / bandwidth,
            }


def dora_ratio(plan: Plan, gaps: Gaps, mode: str) -> float:
    """The step of the arm with DoRA over that of distinct plain adapters, in the largest batch."""
    with_dora, distinct = (
        statistics.median(gaps[mode, max(plan.batches), arm]) for arm in (WITH_DORA, DISTINCT)
    )
    return with_dora / distinct


def read_bytes(plan: Plan, arm: str, batch: int) -> float:
    """What one step reads beside the weights: the batch's KV halfway through its answers, and
    adapters."""
    context = plan.num_prompt_tokens + plan.num_output_tokens // 2
    num_adapters = {"base": 0, "one adapter": 1}.get(arm, batch)
    kv = batch * context * kv_bytes(plan)
    head = head_bytes(plan) if arm in HEAD_ARMS else 0
    vectors = vector_bytes(plan) if arm == WITH_DORA else 0
    return kv + num_adapters * adapter_bytes(plan) + head + vectors


def adapter_bytes(plan: Plan) -> int:
    per_layer = sum(inputs + outputs for inputs, outputs in _linears(plan.shape))
    return _itemsize(plan) * RANK * plan.shape.num_layers * per_layer


def head_bytes(plan: Plan) -> int:
    """Of an adapter's A and B for the output head."""
    return _itemsize(plan) * RANK * (plan.shape.hidden_size + plan.shape.vocab_size)


def vector_bytes(plan: Plan) -> int:
    """Of an adapter's magnitudes, those of the output head included."""
    outputs = plan.shape.num_layers * sum(outputs for _, outputs in _linears(plan.shape))
    return _itemsize(plan) * (outputs + plan.shape.vocab_size)


def kv_bytes(plan: Plan) -> int:
    """Of one token."""
    shape = plan.shape
    head_dim = shape.hidden_size // shape.num_heads
    return 2 * _itemsize(plan) * shape.num_layers * shape.num_kv_heads * head_dim


def _linears(shape: BaseShape) -> list[tuple[int, int]]:
    """Inputs and outputs of one layer's."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    kv = hidden // shape.num_heads * shape.num_kv_heads
    attention = [(hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden)]
    return [*attention, (hidden, inner), (hidden, inner), (inner, hidden)]


def _itemsize(plan: Plan) -> int:
    dtype: torch.dtype = getattr(torch, plan.dtype)
    return dtype.itemsize


if __name__ == "__main__":
    raise SystemExit(main())
