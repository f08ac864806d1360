"""Tests batches: exact results and usage through kills, and the latency of other requests.

    make batch-evidence [ARGS='--lines 10000 --kills 10 --blocks 3 --block-seconds 20']

Prints one JSON object. Exits with 1 if a bar is missed, and names the bar on standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from openai import OpenAI

from support.batch_kills import run_with_kills
from support.batches import completions, create, ended, jsonl
from support.models import make_tiny_llama
from support.mortal_server import mortal_server
from support.server import PRODUCT_ENGINE
from support.waiting import wait_for

MAX_ITL_RATIO = 1.1
EXACT = (
    *("errors", "missing", "repeated", "charged_without_answer"),
    *("answers_without_charge", "other_usage"),
)
NUM_CALLERS = 2
OUTPUT_TOKENS = 64
PAUSE_SECONDS = 0.2
"""Between two rounds of requests: then lines run."""
LINES_PER_SECOND = 250
"""Of a block: more than are answered in it."""


def latency(base: Path, directory: Path, *, blocks: int, block_seconds: float) -> dict[str, Any]:
    """The inter-token latency of streams, alternately without and with a batch beside them."""
    gaps: dict[str, list[float]] = {"without": [], "with": []}
    num_answered = 0
    with mortal_server(base, directory, engine=PRODUCT_ENGINE) as mortal:
        mortal.start()
        caller = mortal.as_server().make_caller("acme")
        with OpenAI(base_url=f"{mortal.url}/v1", api_key=caller.key) as client:
            _measure(client, base.name, block_seconds / 4)  # to warm up
            for _ in range(blocks):
                gaps["without"] += _measure(client, base.name, block_seconds)
                num_lines = int(LINES_PER_SECOND * block_seconds)
                with _batch(client, base.name, num_lines) as counted:
                    gaps["with"] += _measure(client, base.name, block_seconds)
                num_answered += counted[0]
    p99 = {name: float(np.percentile(values, 99)) for name, values in gaps.items()}
    p50 = {name: float(np.percentile(values, 50)) for name, values in gaps.items()}
    return {
        "itl_p99_ms": {name: round(value * 1000, 3) for name, value in p99.items()},
        "itl_p50_ms": {name: round(value * 1000, 3) for name, value in p50.items()},
        "itl_p99_ratio": round(p99["with"] / p99["without"], 3),
        "num_gaps": {name: len(values) for name, values in gaps.items()},
        "lines_answered_meanwhile": num_answered,
    }


@contextmanager
def _batch(client: OpenAI, model: str, num_lines: int) -> Iterator[list[int]]:
    """A batch that runs until the block is left; then how many lines were answered within it."""
    prompts = [f"prompt {number}" for number in range(num_lines)]
    batch = create(client, jsonl(completions(model, prompts, max_tokens=32)))
    wait_for(lambda: _num_answered(client, batch.id), seconds=60.0)
    before = _num_answered(client, batch.id)
    counted: list[int] = []
    yield counted
    counted.append(_num_answered(client, batch.id) - before)
    client.batches.cancel(batch.id)
    ended(client, batch.id)


def _num_answered(client: OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return counts.completed if counts else 0


def _measure(client: OpenAI, model: str, seconds: float) -> list[float]:
    """The gaps between the tokens of streams, in seconds. All callers pause at the same time, so
    the engine is idle once in each round."""
    ends_at = time.monotonic() + seconds

    def ask(number: int) -> list[float]:
        stream = client.completions.create(
            model=model,
            prompt=f"caller {number}",
            max_tokens=OUTPUT_TOKENS,
            temperature=1.0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        arrivals = [time.perf_counter() for chunk in stream if chunk.choices]
        return [after - before for before, after in pairwise(arrivals)]

    gaps: list[float] = []
    with ThreadPoolExecutor(NUM_CALLERS) as callers:
        while time.monotonic() < ends_at:
            for each in callers.map(ask, range(NUM_CALLERS)):
                gaps += each
            time.sleep(PAUSE_SECONDS)
    return gaps


def missed_bars(report: dict[str, Any]) -> list[str]:
    """What is not as it is promised."""
    missed = [f"kills.{name} is {report['kills'][name]}" for name in EXACT if report["kills"][name]]
    ratio = report["latency"]["itl_p99_ratio"]
    if ratio > MAX_ITL_RATIO:
        missed.append(f"latency.itl_p99_ratio is {ratio}, above {MAX_ITL_RATIO}")
    if not report["latency"]["lines_answered_meanwhile"]:
        missed.append("latency.lines_answered_meanwhile is 0")
    return missed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--block-seconds", type=float, default=20.0)
    chosen = parser.parse_args(arguments)
    with TemporaryDirectory() as home:
        base = make_tiny_llama(Path(home) / "base")
        report = {
            "kills": run_with_kills(
                base,
                Path(home) / "kills",
                num_lines=chosen.lines,
                num_kills=chosen.kills,
                engine=PRODUCT_ENGINE,
            ),
            "latency": latency(
                base,
                Path(home) / "latency",
                blocks=chosen.blocks,
                block_seconds=chosen.block_seconds,
            ),
        }
    print(json.dumps(report, indent=2))
    missed = missed_bars(report)
    print("\n".join(missed), file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
