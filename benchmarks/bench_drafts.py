"""An EAGLE head on the demo's base: one stream, by draft length and format of the weights.

    make bench-drafts

The head is trained on requests of the demo's task with answers in the base's own style. Its drafts
of a fixed length, and prompt lookup's beside them, race against plain decoding on held-out
requests: both alternate step by step, and their answers are compared. The table shows how much of
the text prompt lookup finds, the acceptance of each draft token of those that were reached, and the
time per draft token relative to a plain step. Figures are of one run; `auto` lets the engine choose
the length.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.report import MODELS, Row, print_report
from benchmarks.speculation_arms import Arm, race, tokens_per_second
from benchmarks.speculation_work import BASE, demo_work

from loraplex.engine.checkpoint.base_identity import compute_base_id
from loraplex.engine.checkpoint.weights import load_config, load_weights
from loraplex.engine.config import Quantization
from loraplex.engine.speculation.control import Control
from loraplex.engine.speculation.eagle_checkpoint import load_head, save_head
from loraplex.engine.speculation.eagle_training import (
    EagleRecipe,
    TrainedEagle,
    eagle_accuracies,
    train_eagle,
)
from loraplex.engine.speculation.head_training import HeadSchedule
from loraplex.engine.speculation.training_texts import read_texts
from loraplex.engine.text.tokenizer import Tokenizer
from support.medusa import write_demo_texts

NUM_HELD_OUT = 64


@dataclass(frozen=True)
class Plan:
    train_steps: int = 1_000
    num_texts: int = 4_000
    formats: Sequence[str] = ("none", "int8")
    lengths: Sequence[int | None] = (2, 3, 4, None)
    """Draft tokens per step; None: the engine chooses."""
    num_jobs: int = 8
    rounds: int = 3


SMOKE = Plan(2, 80, ("none",), (2, None), num_jobs=2, rounds=1)


@dataclass
class Drafts:
    """What the control was told of a proposer's drafts."""

    seconds: float = 0.0
    num_draft_tokens: int = 0
    reached: list[int] = field(default_factory=lambda: [0] * 64)
    """By position: the draft tokens before which all were accepted."""
    accepted: list[int] = field(default_factory=lambda: [0] * 64)

    @property
    def acceptance(self) -> list[float]:
        pairs = zip(self.accepted, self.reached, strict=True)
        return [accepted / reached for accepted, reached in pairs if reached]

    @property
    def token_seconds(self) -> float:
        return self.seconds / max(self.num_draft_tokens, 1)

    def add(self, num_drafted: int, num_accepted: int) -> None:
        for place in range(num_drafted):
            self.reached[place] += place <= num_accepted
            self.accepted[place] += place < num_accepted


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: whether it runs")
    parser.add_argument("--models", type=Path, default=MODELS, help="where heads are kept")
    options = parser.parse_args(arguments)
    plan = SMOKE if options.smoke else Plan()
    head, held_out = trained_head(options.models, plan)
    rows: list[Row] = []
    num_different = 0
    for weights in plan.formats:
        for entry, lengths in ((f"eagle:{head}", plan.lengths), ("ngram", plan.lengths[-2:-1])):
            for length in lengths:
                row, different = measured(plan, weights, entry, length)
                rows.append(row)
                sys.stderr.write(f"{row}\n")
                num_different += different
    eagle = [float(str(row["faster by"])) for row in rows if row["proposer"] == "eagle"]
    print_report(
        "drafts",
        rows,
        faster_by=max(eagle),
        held_out_acceptance=" ".join(f"{value:.2f}" for value in held_out),
        requests_answered_differently=num_different,
    )
    return 0


def trained_head(folder: Path, plan: Plan) -> tuple[Path, list[float]]:
    """A head in `folder`, trained unless it is there, and its acceptance by position on held-out
    texts."""
    with tempfile.TemporaryDirectory() as data:
        path = write_demo_texts(Path(data) / "texts.jsonl", plan.num_texts)
        texts = read_texts(path, Tokenizer(BASE), max_tokens=128)
    Random(0).shuffle(texts)
    num_held_out = min(NUM_HELD_OUT, len(texts) // 2)
    model = load_weights(BASE, load_config(BASE), torch.float32, torch.device("cpu"))
    schedule = HeadSchedule(num_steps=plan.train_steps, batch_size=8, learning_rate=4e-3)
    recipe = EagleRecipe(schedule=schedule)
    head = folder / f"demo-eagle-{plan.train_steps}"
    if not head.exists():
        trained = train_eagle(model, texts[num_held_out:], recipe)
        save_head(trained.head, head, layers=trained.layers, base_id=compute_base_id(BASE))
    loaded = load_head(
        head,
        hidden_size=model.config.hidden_size,
        vocab_size=model.config.vocab_size,
        num_layers=model.config.num_hidden_layers,
        base_id=compute_base_id(BASE),
        dtype=torch.float32,
    )
    trained = TrainedEagle(loaded.head, loaded.layers)
    return head, eagle_accuracies(model, trained, texts[:num_held_out], recipe.depth)


def measured(plan: Plan, weights: str, entry: str, length: int | None) -> tuple[Row, int]:
    """Races of one proposer, and how many answers differed."""
    jobs = demo_work()["echo"][: plan.num_jobs * plan.rounds]
    with arms(weights, entry) as (plain, drafting):
        # Where the engine chooses, it has learned before.
        for job in demo_work()["echo"][-(1 if length else plan.num_jobs) :]:
            race(plain, drafting, [job], num_forced=length)
        with counted() as drafts:
            rounds = [
                [race(plain, drafting, [job], num_forced=length) for job in some]
                for some in (jobs[start :: plan.rounds] for start in range(plan.rounds))
            ]
    races = [each for some in rounds for each in some]
    speeds = [
        (
            tokens_per_second([each.plain for each in some]),
            tokens_per_second([each.speculative for each in some]),
        )
        for some in rounds
    ]
    step_seconds = median(seconds for each in races for seconds in each.plain.step_seconds)
    num_draws = sum(each.speculative.num_draws - 1 for each in races)
    num_tokens = sum(sum(map(len, each.speculative.answers)) - 1 for each in races)
    row: Row = {
        "proposer": entry.partition(":")[0],
        "weights": "fp32" if weights == "none" else weights,
        "draft tokens": "auto" if length is None else str(length),
        "plain tokens/s": median(plain for plain, _ in speeds),
        "tokens/s": median(drafting for _, drafting in speeds),
        "faster by": median(drafting / plain for plain, drafting in speeds),
        "tokens per step": num_tokens / max(num_draws, 1),
        "acceptance by position": " ".join(f"{value:.2f}" for value in drafts.acceptance),
        "ms per draft token": drafts.token_seconds * 1e3,
        "ms per plain step": step_seconds * 1e3,
    }
    return row, sum(each.num_different for each in races)


@contextmanager
def arms(weights: str, entry: str) -> Iterator[tuple[Arm, Arm]]:
    """Plain decoding, and drafting with this proposer."""
    with tempfile.TemporaryDirectory() as folder:
        opened = [
            Arm(BASE, Path(folder), speculation=speculation, quantization=Quantization(weights))
            for speculation in ((), (entry,))
        ]
        try:
            yield opened[0], opened[1]
        finally:
            for arm in opened:
                arm.close()


@contextmanager
def counted() -> Iterator[Drafts]:
    """Counts the drafts of engines in this process."""
    drafts, observe, propose = Drafts(), Control.observe, Control.observe_proposals

    def observing(control: Control, *args: Any) -> None:
        _, _, num_drafted, accepted = args
        drafts.add(num_drafted, len(accepted))
        observe(control, *args)

    def proposing(control: Control, *args: Any) -> None:
        _, lengths, seconds = args
        drafts.seconds += seconds
        drafts.num_draft_tokens += sum(length for _, length in lengths)
        propose(control, *args)

    with (
        patch.object(Control, "observe", observing),
        patch.object(Control, "observe_proposals", proposing),
    ):
        yield drafts


if __name__ == "__main__":
    raise SystemExit(main())
