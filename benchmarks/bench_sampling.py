"""What limits and penalties of single rows cost a step's sampling on the CPU.

    make bench-sampling           ARGS="--vocab-size 128000 --history 32000 --json FILE"

It samples a token for each row of random logits with one thread and takes the CPU time, the median
of several repeats: without parameters, with parameters in one row, and in all rows. The difference
is what the parameters cost. Logits of a small deviation are the hard case of `top_p`, because it
keeps half of the vocabulary.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from loraplex.engine.execution.sampler import row_after, sample
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams

PARAMETERS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 50},
    "min_p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
}
DEVIATIONS = (1.0, 4.0)
"""Of the logits."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocab-size", type=int, default=128_000)
    parser.add_argument("--history", type=int, default=32_000, help="tokens of each row's prompt")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    figures = [
        measure(name, options.vocab_size, num_rows, options.history, deviation, options.repeats)
        for num_rows in options.rows
        for deviation in DEVIATIONS
        for name in PARAMETERS
    ]
    print(
        f"CPU ms of sampling from {options.vocab_size} tokens after {options.history}, one thread"
    )
    print("  rows  deviation  parameter    without   in one row   in all rows")
    for line in figures:
        print(
            f"  {line['rows']:4}  {line['deviation']:9}  {line['parameter']:10}"
            f"{line['without_ms']:10.1f}{line['one_row_ms']:13.1f}{line['all_rows_ms']:14.1f}"
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(
    parameter: str,
    vocab_size: int,
    num_rows: int,
    history: int,
    deviation: float,
    repeats: int,
) -> dict[str, Any]:
    """CPU milliseconds of one step's sampling with the parameter in no, one and all rows."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * deviation
    prompt = torch.randint(vocab_size, (history,), generator=generator).tolist()
    steps = [make_requests(parameter, num_rows, num, prompt) for num in (0, 1, num_rows)]
    times: list[list[float]] = [[] for _ in steps]
    for requests in steps:
        cpu_ms(logits, requests)  # once for each request its prompt is read
    for _ in range(repeats):
        for requests, taken in zip(steps, times, strict=True):
            taken.append(cpu_ms(logits, requests))
    without, one, every = map(median, times)
    return {
        "parameter": parameter,
        "rows": num_rows,
        "deviation": deviation,
        "without_ms": without,
        "one_row_ms": one,
        "all_rows_ms": every,
    }


def make_requests(parameter: str, num_rows: int, num_with: int, prompt: list[int]) -> list[Request]:
    namespace = CacheNamespace("tenant", "runtime", None)
    requests = []
    for row in range(num_rows):
        params = PARAMETERS[parameter] if row < num_with else {}
        sampling = SamplingParams(max_tokens=1, temperature=1.0, **params)
        submitted = GenerationRequest(f"request {row}", "tenant", prompt, sampling)
        requests.append(Request(submitted, namespace, row, 0.0, None))
    return requests


def cpu_ms(logits: Tensor, requests: list[Request]) -> float:
    """Of one step, whose tokens the requests have afterwards."""
    began = time.process_time()
    tokens = sample(logits, list(map(row_after, requests)))
    for request, token in zip(requests, tokens, strict=True):
        request.token_ids.append(token)
    return (time.process_time() - began) * 1e3


if __name__ == "__main__":
    main()
