"""Measures the latency of one tenant's streams beside another tenant's shadow.

    make shadow-evidence [ARGS='--blocks 3 --block-seconds 20']

Both kinds of block have the same live requests of the alias; in one kind, a shadow answers copies
of all of them. Prints one JSON object. Exits with 1 if a bar is missed, and names the bar on
standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from support.models import make_adapter, make_tiny_llama
from support.mortal_server import mortal_server
from support.server import PRODUCT_ENGINE, Caller
from support.waiting import wait_for

MAX_ITL_RATIO = 1.05
NUM_STREAMS = 2
NUM_LIVE = 2
"""Requests of the alias in a round."""
OUTPUT_TOKENS = 64
PAUSE_SECONDS = 0.2
"""Between two rounds of requests: then copies run."""
PROD = "/v1/adapters/bot/aliases/prod"
SHADOW = f"{PROD}/shadow"


def latency(base: Path, directory: Path, *, blocks: int, block_seconds: float) -> dict[str, Any]:
    """The inter-token latency of streams, alternately without and with a shadow beside them."""
    gaps: dict[str, list[float]] = {"without": [], "with": []}
    num_compared = 0
    with mortal_server(base, directory, engine=PRODUCT_ENGINE) as mortal:
        mortal.start()
        owner, other = (mortal.as_server().make_caller(slug) for slug in ("acme", "other"))
        for seed in (1, 2):
            owner.push(make_adapter(base, directory / f"adapter-{seed}", seed=seed), "bot")
        owner.http.put(PROD, json={"version": 1}).raise_for_status()
        measure = partial(_measure, other, owner, base.name)
        measure(block_seconds / 4)  # to warm up
        for _ in range(blocks):
            gaps["without"] += measure(block_seconds)
            owner.http.put(SHADOW, json={"version": 2, "percent": 100}).raise_for_status()
            gaps["with"] += measure(block_seconds)
            wait_for(lambda: _num_compared(owner))
            num_compared += _num_compared(owner)
            owner.http.delete(SHADOW).raise_for_status()
    p99 = {name: float(np.percentile(values, 99)) for name, values in gaps.items()}
    p50 = {name: float(np.percentile(values, 50)) for name, values in gaps.items()}
    return {
        "itl_p99_ms": {name: round(value * 1000, 3) for name, value in p99.items()},
        "itl_p50_ms": {name: round(value * 1000, 3) for name, value in p50.items()},
        "itl_p99_ratio": round(p99["with"] / p99["without"], 3),
        "num_gaps": {name: len(values) for name, values in gaps.items()},
        "num_compared": num_compared,
    }


def _num_compared(owner: Caller) -> int:
    num_compared: int = owner.http.get(SHADOW).json()["compared"]
    return num_compared


def _measure(other: Caller, owner: Caller, model: str, seconds: float) -> list[float]:
    """The gaps between the tokens of the other tenant's streams, in seconds. All callers pause at
    the same time, so the engine is idle once in each round."""
    ends_at = time.monotonic() + seconds

    def stream(number: int) -> list[float]:
        chunks = other.openai.completions.create(
            model=model,
            prompt=f"caller {number}",
            max_tokens=OUTPUT_TOKENS,
            temperature=1.0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        arrivals = [time.perf_counter() for chunk in chunks if chunk.choices]
        return [after - before for before, after in pairwise(arrivals)]

    def live(number: int) -> list[float]:
        body = {"model": "bot@prod", "prompt": f"live {number}", "max_tokens": 32}
        owner.http.post("/v1/completions", json=body).raise_for_status()
        return []

    gaps: list[float] = []
    with ThreadPoolExecutor(NUM_STREAMS + NUM_LIVE) as callers:
        while time.monotonic() < ends_at:
            answers = [
                *(callers.submit(stream, number) for number in range(NUM_STREAMS)),
                *(callers.submit(live, number) for number in range(NUM_LIVE)),
            ]
            for answer in answers:
                gaps += answer.result()
            time.sleep(PAUSE_SECONDS)
    return gaps


def missed_bars(report: dict[str, Any]) -> list[str]:
    """What is not as it is promised."""
    missed = []
    if report["itl_p99_ratio"] > MAX_ITL_RATIO:
        missed.append(f"itl_p99_ratio is {report['itl_p99_ratio']}, above {MAX_ITL_RATIO}")
    if not report["num_compared"]:
        missed.append("num_compared is 0")
    return missed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--block-seconds", type=float, default=20.0)
    chosen = parser.parse_args(arguments)
    with TemporaryDirectory() as home:
        base = make_tiny_llama(Path(home) / "base")
        directory = Path(home) / "latency"
        report = latency(base, directory, blocks=chosen.blocks, block_seconds=chosen.block_seconds)
    print(json.dumps(report, indent=2))
    missed = missed_bars(report)
    print("\n".join(missed), file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
