"""A base without some of its layers as its draft, with and without an adapter: one stream.

    make bench-skipped-layers

The base is the demo's with widened MLPs, as in `bench_quantized_drafts`. `loraplex drafts layers`
chooses the best layers to leave out for each size of the set, by texts like the base's answers.
Drafts without them, and those of early exit, race against plain decoding on held-out requests: both
alternate step by step, and their answers are compared. The table shows what the choice predicted
for the base alone, and what came of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench_quantized_drafts import measured, widened
from benchmarks.report import MODELS, Row, print_report
from benchmarks.speculation_arms import Arm
from benchmarks.speculation_work import ADAPTERS, BASE

from loraplex.api.cli.draft_layers import Choice, choose
from loraplex.engine.layer_numbers import layers_text
from support.medusa import write_demo_texts


@dataclass(frozen=True)
class Plan:
    width: int = 24_576
    """The MLPs' intermediate size."""
    work: Sequence[str] = ("echo", "sql")
    lengths: Sequence[int | None] = (3, None)
    """Draft tokens per step; None: the engine chooses."""
    num_texts: int = 200
    num_prefixes: int = 128
    num_jobs: int = 1
    rounds: int = 3


SMOKE = Plan(512, ("sql",), (2,), num_texts=8, num_prefixes=16, num_jobs=1, rounds=1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: whether it runs")
    parser.add_argument("--models", type=Path, default=MODELS, help="where the base is kept")
    options = parser.parse_args(arguments)
    plan = SMOKE if options.smoke else Plan()
    models = {name: options.models / f"demo-{name}-{plan.width}" for name in (BASE.name, *ADAPTERS)}
    for name, path in models.items():
        if not path.exists():
            widened(BASE.parent / name, path, plan.width)
    rows: list[Row] = []
    num_different = 0
    with tempfile.TemporaryDirectory() as folder:
        choice = _chosen(plan, models[BASE.name], Path(folder))
        for entry, predicted in _entries(choice).items():
            with _arms(models, Path(folder), entry) as (plain, drafting):
                for work in plan.work:
                    for length in plan.lengths:
                        row, different = measured(plan, plain, drafting, work, length)
                        rows.append({"drafts": entry, "predicted for echo": predicted, **row})
                        sys.stderr.write(f"{rows[-1]}\n")
                        num_different += different
    print_report(
        "skipped-layers",
        rows,
        chosen=choice.option or "none",
        requests_answered_differently=num_different,
    )
    return 0


def _chosen(plan: Plan, base: Path, folder: Path) -> Choice:
    texts = write_demo_texts(folder / "texts.jsonl", plan.num_texts)
    return choose(
        str(base),
        texts,
        max_draft_tokens=8,
        prefixes=plan.num_prefixes,
        beam=2,
        max_tokens=256,
        device="cpu",
    )


def _entries(choice: Choice) -> dict[str, float]:
    """Early exit of each size, and the best other sets; the tokens per second predicted for each,
    relative to plain decoding."""
    entries = {
        f"early_exit:{choice.costs.num_layers - len(row.early_exit.left_out)}": row.early_exit.ratio
        for row in choice.rows
    }
    others = {
        f"skip:{layers_text(row.best.left_out)}": row.best.ratio
        for row in choice.rows
        if row.best.left_out != row.early_exit.left_out
    }
    return entries | others


@contextmanager
def _arms(models: Mapping[str, Path], folder: Path, entry: str) -> Iterator[tuple[Arm, Arm]]:
    """Plain decoding, and drafting with a part of the base."""
    opened = [
        Arm(
            models[BASE.name],
            folder,
            speculation=speculation,
            adapters={name: models[name] for name in ADAPTERS},
            arena_bytes=128 << 20,
            host_cache_bytes=256 << 20,
        )
        for speculation in ((), (entry,))
    ]
    try:
        yield opened[0], opened[1]
    finally:
        for arm in opened:
            arm.close()


if __name__ == "__main__":
    raise SystemExit(main())
