"""Prompt tokens and TTFT of an agent that switches among adapters within one conversation.

    make bench-agent

The same conversation is held twice on one engine with a prefix cache: with plain LoRA adapters and
with activated ones of the same size. It begins with a context, and each turn appends the
invocation of the next adapter and its answer. An activated adapter reuses the base's KV of the
whole conversation before its invocation; a plain one has its own.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.report import parse_options, print_report
from benchmarks.timed_engine import (
    MEASURED_SHAPE,
    SMOKE_SHAPE,
    Order,
    TimedEngine,
    make_model,
    random_prompt,
)

from loraplex.adapters.identity import AdapterKey
from loraplex.api.bench.models import BaseShape
from support.models import make_adapter

KINDS = ("plain", "activated")
LONG_SHAPE = replace(MEASURED_SHAPE, num_layers=6, max_model_len=4_096)


@dataclass(frozen=True)
class Plan:
    shape: BaseShape = LONG_SHAPE
    num_context_tokens: int = 2_000
    num_adapters: int = 4
    num_turns: int = 8
    num_answer_tokens: int = 16
    num_invocation_tokens: int = 4
    rank: int = 16


SMOKE = Plan(SMOKE_SHAPE, num_context_tokens=100, num_adapters=2, num_turns=4, num_answer_tokens=4)


@dataclass(frozen=True)
class Outcome:
    """One conversation."""

    num_prompt_tokens: int
    num_computed_tokens: int
    """Prompt tokens that were not in the cache."""
    first_ttft_seconds: float
    ttft_seconds: list[float]
    """Of the turns after the first."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__ or "", arguments)
    plan = SMOKE if options.is_smoke else Plan()
    outcomes = measure(make_model(options.models, plan.shape), plan)
    plain, activated = (outcomes[kind] for kind in KINDS)
    medians = [statistics.median(outcomes[kind].ttft_seconds) for kind in KINDS]
    print_report(
        "agent",
        [
            {
                "adapters": kind,
                "prompt tokens": outcome.num_prompt_tokens,
                "computed": outcome.num_computed_tokens,
                "first TTFT, ms": 1_000 * outcome.first_ttft_seconds,
                "later TTFT, ms": 1_000 * median,
                "longest later TTFT, ms": 1_000 * max(outcome.ttft_seconds),
            }
            for (kind, outcome), median in zip(outcomes.items(), medians, strict=True)
        ],
        context_tokens=plan.num_context_tokens,
        adapters=plan.num_adapters,
        turns=plan.num_turns,
        rank=plan.rank,
        computed_ratio=plain.num_computed_tokens / activated.num_computed_tokens,
        sum_of_ttft_ratio=_sum_of_ttft(plain) / _sum_of_ttft(activated),
        later_ttft_ratio=medians[0] / medians[1],
    )
    return 0


def measure(model: Path, plan: Plan) -> dict[str, Outcome]:
    rng = Random(1)
    context = random_prompt(rng, plan.shape, plan.num_context_tokens)
    invocations = [
        random_prompt(rng, plan.shape, plan.num_invocation_tokens) for _ in range(plan.num_adapters)
    ]
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        engine = TimedEngine(
            model, home, kv_cache_bytes=512 << 20, arena_bytes=64 << 20, host_cache_bytes=64 << 20
        )
        keys = {
            kind: [
                _add_adapter(engine, model, home / f"{kind}{index}", plan, kind, invocation)
                for index, invocation in enumerate(invocations)
            ]
            for kind in KINDS
        }
        engine.warm_up()
        for key in [*keys["plain"], *keys["activated"]]:  # no turn waits for a load
            engine.generate([5], key)
        outcomes = {
            kind: _converse(engine, context, invocations, keys[kind], plan) for kind in KINDS
        }
        engine.close()
    return outcomes


def _add_adapter(
    engine: TimedEngine, model: Path, path: Path, plan: Plan, kind: str, invocation: list[int]
) -> AdapterKey:
    activation: dict[str, Any] = {}
    if kind == "activated":
        activation = {"alora_invocation_tokens": invocation}
    seed = len(engine.paths)
    make_adapter(model, path, seed=seed, r=plan.rank, task_type="CAUSAL_LM", **activation)
    return engine.add_adapter(path, "bench")


def _converse(
    engine: TimedEngine,
    context: list[int],
    invocations: list[list[int]],
    keys: list[AdapterKey],
    plan: Plan,
) -> Outcome:
    conversation, ids = context, []
    num_prompt_tokens = num_computed = 0
    for turn in range(plan.num_turns):
        prompt = [*conversation, *invocations[turn % len(invocations)]]
        request_id = engine.send(
            Order(prompt, plan.num_answer_tokens, adapter=keys[turn % len(keys)])
        )
        engine.run()
        answer = engine.answers[request_id]
        assert answer.started is not None, "it has ended"
        num_prompt_tokens += len(prompt)
        num_computed += len(prompt) - answer.started.num_cached_tokens
        conversation = [*prompt, *answer.token_ids]
        ids.append(request_id)
    first, *later = (timing.ttft_seconds for timing in engine.timings(ids))
    return Outcome(num_prompt_tokens, num_computed, first, later)


def _sum_of_ttft(outcome: Outcome) -> float:
    return outcome.first_ttft_seconds + sum(outcome.ttft_seconds)


if __name__ == "__main__":
    sys.exit(main())
