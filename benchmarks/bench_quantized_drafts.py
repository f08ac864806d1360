"""A base's quantized copy as its draft, with and without an adapter: one stream.

    make bench-quantized-drafts

The base is the demo's, whose MLPs are widened with zeros: it computes the same, and a step reads as
many weights as one of a base of 40 million parameters, so that fewer bits take less time. Zeros are
rounded exactly: acceptance is that of the demo's own weights. Drafts race against plain decoding on
held-out requests: both alternate step by step, and their answers are compared. The table shows the
acceptance of each draft token of those that were reached, and the time per draft token relative to
a plain step. `auto` lets the engine choose the length.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

import torch
from benchmarks.bench_drafts import counted
from benchmarks.report import MODELS, Row, print_report
from benchmarks.speculation_arms import Arm, race, tokens_per_second
from benchmarks.speculation_work import ADAPTERS, BASE, demo_work
from safetensors.torch import load_file, save_file
from torch import Tensor

from loraplex.engine.config import Quantization

OUTPUTS = ("gate_proj.weight", "up_proj.weight", "gate_proj.lora_B.weight", "up_proj.lora_B.weight")
"""Whose rows are intermediate features."""
INPUTS = ("down_proj.weight", "down_proj.lora_A.weight")
"""Whose columns are."""


class Load(Protocol):
    """How much is decoded for one row of the table."""

    @property
    def num_jobs(self) -> int:
        """The answers of a round."""

    @property
    def rounds(self) -> int:
        """Those of which the median counts."""


@dataclass(frozen=True)
class Plan:
    width: int = 24_576
    """The MLPs' intermediate size."""
    cases: Sequence[tuple[str, str]] = (("none", "int8"), ("none", "int4"), ("int8", "int4"))
    """The format of the base, and of its copy."""
    work: Sequence[str] = ("echo", "sql")
    lengths: Sequence[int | None] = (3, None)
    """Draft tokens per step; None: the engine chooses."""
    num_jobs: int = 3
    rounds: int = 3


SMOKE = Plan(512, cases=(("none", "int8"),), work=("sql",), lengths=(2, None), num_jobs=1, rounds=1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: whether it runs")
    parser.add_argument("--models", type=Path, default=MODELS, help="where the base is kept")
    options = parser.parse_args(arguments)
    plan = SMOKE if options.smoke else Plan()
    rows: list[Row] = []
    num_different = 0
    models = {name: options.models / f"demo-{name}-{plan.width}" for name in (BASE.name, *ADAPTERS)}
    for name, path in models.items():
        if not path.exists():
            widened(BASE.parent / name, path, plan.width)
    with tempfile.TemporaryDirectory() as folder:
        for weights, copy in plan.cases:
            with arms(models, Path(folder), weights, copy) as (plain, drafting):
                for work in plan.work:
                    for length in plan.lengths:
                        row, different = measured(plan, plain, drafting, work, length)
                        served = "fp32" if weights == "none" else weights
                        rows.append({"base": served, "copy": copy, **row})
                        sys.stderr.write(f"{rows[-1]}\n")
                        num_different += different
    print_report(
        "quantized-drafts",
        rows,
        faster_by=max(float(str(row["faster by"])) for row in rows),
        requests_answered_differently=num_different,
    )
    return 0


def widened(model: Path, folder: Path, width: int) -> Path:
    """A copy of the base or adapter with MLPs of this size, which computes the same."""
    shutil.copytree(model, folder)
    config = folder / "config.json"
    if config.exists():
        values = json.loads(config.read_text())
        config.write_text(json.dumps({**values, "intermediate_size": width}))
    (path,) = folder.glob("*.safetensors")
    tensors = {name: _widened(name, tensor, width) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def _widened(name: str, tensor: Tensor, width: int) -> Tensor:
    rows, columns = tensor.shape if tensor.ndim == 2 else (0, 0)
    if name.endswith(OUTPUTS):
        return torch.cat([tensor, tensor.new_zeros(width - rows, columns)])
    if name.endswith(INPUTS):
        return torch.cat([tensor, tensor.new_zeros(rows, width - columns)], dim=1)
    return tensor


@contextmanager
def arms(
    models: Mapping[str, Path], folder: Path, weights: str, copy: str
) -> Iterator[tuple[Arm, Arm]]:
    """Plain decoding, and drafting with the copy."""
    adapters = {name: models[name] for name in ADAPTERS}
    opened = [
        Arm(
            models[BASE.name],
            folder,
            speculation=speculation,
            adapters=adapters,
            quantization=Quantization(weights),
            arena_bytes=128 << 20,
            host_cache_bytes=256 << 20,
        )
        for speculation in ((), (f"quantized:{copy}",))
    ]
    try:
        yield opened[0], opened[1]
    finally:
        for arm in opened:
            arm.close()


def measured(
    plan: Load, plain: Arm, drafting: Arm, work: str, length: int | None
) -> tuple[Row, int]:
    """Races at one draft length, and how many answers differed."""
    jobs = demo_work()[work]
    for job in jobs[-plan.num_jobs :]:  # where the engine chooses, it has learned before
        race(plain, drafting, [job], num_forced=length)
    with counted() as drafts:
        rounds = [
            [race(plain, drafting, [job], num_forced=length) for job in some]
            for some in (
                jobs[start : plan.num_jobs * plan.rounds : plan.rounds]
                for start in range(plan.rounds)
            )
        ]
    races = [each for some in rounds for each in some]
    ratios = [
        tokens_per_second([each.speculative for each in some])
        / tokens_per_second([each.plain for each in some])
        for some in rounds
    ]
    step_seconds = median(seconds for each in races for seconds in each.plain.step_seconds)
    row: Row = {
        "work": work,
        "draft tokens": "auto" if length is None else str(length),
        "faster by": median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "acceptance by position": " ".join(f"{value:.2f}" for value in drafts.acceptance),
        "draft token / plain step": drafts.token_seconds / step_seconds,
        "ms per plain step": step_seconds * 1e3,
    }
    return row, sum(each.num_different for each in races)


if __name__ == "__main__":
    raise SystemExit(main())
