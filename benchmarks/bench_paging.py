"""The number of concurrent sequences in the same bytes of KV: paged, or with reserved maximum.

    make bench-paging

Reserved: the engine admits no more sequences than would fit with maximum length, like a server that
reserves the whole context of every sequence. Both serve the same trace of mixed lengths. It counts
the running sequences in each step with waiting requests. Published: 2 to 4 times.
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
    kv_bytes_per_token,
    make_model,
    variable_length_trace,
)

from loraplex.api.bench.models import BaseShape


@dataclass(frozen=True)
class Plan:
    shape: BaseShape = MEASURED_SHAPE
    num_requests: int = 96
    max_model_len: int = 1_024
    num_reserved: int = 8
    """Longest sequences that fit into the KV cache."""
    mean_prompt_tokens: int = 160
    mean_output_tokens: int = 160

    @property
    def kv_cache_bytes(self) -> int:
        return self.num_reserved * self.max_model_len * kv_bytes_per_token(self.shape)


SMOKE = Plan(
    SMOKE_SHAPE,
    num_requests=16,
    max_model_len=128,
    num_reserved=2,
    mean_prompt_tokens=12,
    mean_output_tokens=12,
)


@dataclass(frozen=True)
class Outcome:
    """One engine's run over the trace."""

    name: str
    num_running: list[int]
    """In each step that left requests waiting; those that ended in it ran, too."""
    num_preemptions: int
    seconds: float
    answers: list[list[int]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__ or "", arguments)
    plan = SMOKE if options.is_smoke else Plan()
    model = make_model(options.models, plan.shape)
    trace = variable_length_trace(
        Random(1),
        plan.shape,
        plan.num_requests,
        mean_prompt_tokens=plan.mean_prompt_tokens,
        mean_output_tokens=plan.mean_output_tokens,
        max_tokens=plan.max_model_len,
    )
    paged = measure(model, plan, trace, "paged", max_num_seqs=plan.num_requests)
    reserved = measure(model, plan, trace, "reserved maximum", max_num_seqs=plan.num_reserved)
    num_tokens = sum(order.num_output_tokens for order in trace)
    print_report(
        "paging",
        [
            {
                "KV": outcome.name,
                "sequences at once, mean": statistics.fmean(outcome.num_running),
                "most": max(outcome.num_running),
                "preemptions": outcome.num_preemptions,
                "output tokens/s": num_tokens / outcome.seconds,
            }
            for outcome in (reserved, paged)
        ],
        kv_cache_bytes=plan.kv_cache_bytes,
        mean_tokens_per_sequence=statistics.fmean(
            len(order.prompt) + order.num_output_tokens for order in trace
        ),
        max_model_len=plan.max_model_len,
        sequences_ratio=statistics.fmean(paged.num_running)
        / statistics.fmean(reserved.num_running),
        requests_answered_differently=sum(
            a != b for a, b in zip(paged.answers, reserved.answers, strict=True)
        ),
    )
    return 0


def measure(
    model: Path, plan: Plan, trace: Sequence[Order], name: str, *, max_num_seqs: int
) -> Outcome:
    with tempfile.TemporaryDirectory() as directory:
        engine = TimedEngine(
            model,
            Path(directory),
            max_num_seqs=max_num_seqs,
            max_model_len=plan.max_model_len,
            kv_cache_bytes=plan.kv_cache_bytes,
            prefix_caching=False,
        )
        engine.warm_up()
        ids = engine.send_all(trace)
        began = time.perf_counter()
        num_running = []
        while engine.core.has_work:
            num_open = engine.num_open
            engine.step()
            if engine.num_waiting:
                num_running.append(engine.num_running + num_open - engine.num_open)
        seconds = time.perf_counter() - began
        outcome = Outcome(
            name, num_running, engine.core.stats().num_preemptions, seconds, engine.tokens(ids)
        )
        engine.close()
    return outcome


if __name__ == "__main__":
    sys.exit(main())
