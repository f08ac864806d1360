"""An EAGLE head on the demo's base: one stream, by text, draft length and format of the weights.

    make bench-drafts

`loraplex drafts train` trains the head on the base's own text: continuations of bare text, which
repeat nothing (`bare_text`), and answers to the demo's task, which repeat the question. Its chains
and trees of a fixed size, and prompt lookup's drafts beside them, race against plain decoding on
held-out prompts: both alternate step by step, and their answers are compared. The table shows the
acceptance of each draft token of those that were reached, for chains, and the time per draft token
relative to a plain step. With 0 draft tokens the head is served and does not draft; with `auto` the
engine chooses the number. Figures are medians of the rounds of one run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.bare_text import (
    MAX_REPEATED,
    openings,
    repeated_share,
    unrepeated_jobs,
    write_own_texts,
)
from benchmarks.report import MODELS, Row, print_report
from benchmarks.speculation_arms import Arm, Job, race, tokens_per_second
from benchmarks.speculation_work import ADAPTERS, BASE, demo_work

from loraplex.api.demo.task import held_out_requests, training_requests
from loraplex.engine.checkpoint.base_identity import compute_base_id
from loraplex.engine.checkpoint.weights import load_config, load_weights
from loraplex.engine.config import Quantization
from loraplex.engine.speculation.control import Control
from loraplex.engine.speculation.eagle_checkpoint import load_head
from loraplex.engine.speculation.eagle_training import (
    DEFAULT_DEPTH,
    TrainedEagle,
    eagle_accuracies,
)
from loraplex.engine.speculation.training_texts import read_texts
from loraplex.engine.text.tokenizer import Tokenizer
from support.medusa import write_demo_texts

NUM_HELD_OUT = 64
DRAFT_VOCAB_SIZE = 384
"""Tokens that the head drafts: 99.8 % of those in the texts."""
BARE, SAMPLED, ECHO, PIRATE = "bare", "bare, temperature 1", "echo", "pirate"
"""The texts: greedy and sampled continuations of bare text, and greedy answers to the task: those
of the base, and those of an adapter, on whose text the head was not trained."""
CHAINS, TREES, NGRAM = "eagle", "eagle_tree", "ngram"


@dataclass(frozen=True, slots=True)
class Plan:
    train_steps: int = 1_000
    num_bare_texts: int = 4_000
    num_echo_texts: int = 2_000
    formats: Sequence[str] = ("none", "int8")
    lengths: Mapping[str, Sequence[int | None]] = field(
        default_factory=lambda: {
            BARE: (0, 2, 3, 4, None),
            SAMPLED: (3,),
            ECHO: (3,),
            PIRATE: (3, 6, None),
        }
    )
    """By text the draft tokens per step; None: the engine chooses."""
    tree_sizes: Mapping[str, Sequence[int | None]] = field(
        default_factory=lambda: {
            BARE: (3, 4, None),
            SAMPLED: (3,),
            ECHO: (3,),
            PIRATE: (3, 6, None),
        }
    )
    """The same for trees."""
    num_jobs: int = 3
    """Of a round."""
    rounds: int = 5


SMOKE = Plan(2, 70, 10, ("none",), {SAMPLED: (2,)}, {SAMPLED: (2,)}, num_jobs=1, rounds=1)
NGRAM_LENGTH = 4


@dataclass
class Drafts:
    """What the control was told of a proposer's drafts."""

    seconds: list[float] = field(default_factory=list)
    """Per draft token of each call."""
    reached: list[int] = field(default_factory=lambda: [0] * 64)
    """By position: the draft tokens before which all were accepted."""
    accepted: list[int] = field(default_factory=lambda: [0] * 64)

    @property
    def acceptance(self) -> list[float]:
        pairs = zip(self.accepted, self.reached, strict=True)
        return [accepted / reached for accepted, reached in pairs if reached]

    @property
    def token_seconds(self) -> float:
        """The median, because single calls are held up by other programs."""
        return median(self.seconds) if self.seconds else 0.0

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
    head = trained_head(options.models, plan)
    work = {text: chosen_jobs(text, plan) for text in plan.lengths}
    rows: list[Row] = []
    num_different = 0
    for weights in plan.formats:
        for text, lengths in plan.lengths.items():
            chains = [(f"{CHAINS}:{head}", length) for length in lengths]
            trees = [(f"{TREES}:{head}", size) for size in plan.tree_sizes[text]]
            for entry, length in [*chains, *trees, (NGRAM, NGRAM_LENGTH)]:
                row, different = measured(plan, text, work[text], weights, entry, length)
                rows.append(row)
                sys.stderr.write(f"{row}\n")
                num_different += different
    unrepeated = [
        row for row in rows if row["proposer"] == CHAINS and row["text"] in (BARE, SAMPLED)
    ]
    print_report(
        "drafts",
        rows,
        faster_by=max(float(str(row["faster by"])) for row in unrepeated),
        held_out_acceptance=" ".join(f"{value:.2f}" for value in held_out_acceptance(head)),
        repeated_at_most=MAX_REPEATED,
        requests_answered_differently=num_different,
    )
    return 0


def trained_head(folder: Path, plan: Plan) -> Path:
    """A head in `folder`, trained by the command unless it is there."""
    head = folder / f"demo-eagle-bare-{plan.train_steps}"
    if head.exists():
        return head
    with tempfile.TemporaryDirectory() as data:
        requests = islice(training_requests(31), plan.num_bare_texts)
        prompts = list(openings(requests, Tokenizer(BASE), seed=31))
        bare = write_own_texts(Path(data) / "bare.jsonl", prompts, seed=1_000)
        echo = write_demo_texts(Path(data) / "echo.jsonl", plan.num_echo_texts)
        texts = Path(data) / "texts.jsonl"
        texts.write_text(bare.read_text() + echo.read_text())
        options: dict[str, object] = {
            "model": BASE,
            "kind": "eagle",
            "data": texts,
            "out": head,
            "draft-vocab-size": DRAFT_VOCAB_SIZE,
            "steps": plan.train_steps,
            "batch-size": 8,
            "max-tokens": 128,
            "learning-rate": 4e-3,
            "device": "cpu",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        trained = subprocess.run(
            [sys.executable, "-m", "loraplex", "drafts", "train", *words],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    sys.stderr.write(trained.stdout)
    return head


def held_out_acceptance(head: Path) -> list[float]:
    """By position, on bare text that the base has generated of held-out requests."""
    tokenizer = Tokenizer(BASE)
    model = load_weights(BASE, load_config(BASE), torch.float32, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as data:
        prompts = list(openings(held_out_requests(NUM_HELD_OUT), tokenizer, seed=2))
        path = write_own_texts(Path(data) / "texts.jsonl", prompts, seed=2)
        texts = read_texts(path, tokenizer, max_tokens=128)
    loaded = load_head(
        head,
        hidden_size=model.config.hidden_size,
        vocab_size=model.config.vocab_size,
        num_layers=model.config.num_hidden_layers,
        base_id=compute_base_id(BASE),
        dtype=torch.float32,
    )
    return eagle_accuracies(model, TrainedEagle(loaded.head, loaded.layers), texts, DEFAULT_DEPTH)


def chosen_jobs(text: str, plan: Plan) -> list[Job]:
    """As many as the rounds need, and those of one more round to learn from."""
    num_jobs = plan.num_jobs * (plan.rounds + 1)
    if text in (ECHO, PIRATE):
        return demo_work()[text][:num_jobs]
    tokenizer = Tokenizer(BASE)
    # Each request several times, in other styles and cut elsewhere: greedy answers are few.
    prompts = chain.from_iterable(
        openings(held_out_requests(), tokenizer, seed) for seed in range(1, 9)
    )
    temperature = 1.0 if text == SAMPLED else 0.0
    return unrepeated_jobs(prompts, num_jobs, temperature=temperature)


def measured(
    plan: Plan, text: str, jobs: Sequence[Job], weights: str, entry: str, length: int | None
) -> tuple[Row, int]:
    """Races of one proposer, and how many answers differed."""
    with arms(weights, entry) as (plain, drafting):
        # Where the engine chooses, it has learned before.
        for job in jobs[: 1 if length is not None else plan.num_jobs]:
            race(plain, drafting, [job], num_forced=length)
        with counted() as drafts:
            rounds = [
                [race(plain, drafting, [job], num_forced=length) for job in some]
                for some in (
                    jobs[start : start + plan.num_jobs]
                    for start in range(plan.num_jobs, len(jobs), plan.num_jobs)
                )
            ]
    races = [each for some in rounds for each in some]
    ratios = [
        tokens_per_second([each.speculative for each in some])
        / tokens_per_second([each.plain for each in some])
        for some in rounds
    ]
    plain_seconds = median(seconds for each in races for seconds in each.plain.step_seconds)
    step_seconds = median(seconds for each in races for seconds in each.speculative.step_seconds)
    num_draws = sum(each.speculative.num_draws - 1 for each in races)
    num_tokens = sum(sum(map(len, each.speculative.answers)) - 1 for each in races)
    repeated = [
        repeated_share(job.prompt, answer)
        for job, each in zip(jobs[plan.num_jobs :], races, strict=True)
        for answer in each.plain.answers
    ]
    name, _, _ = entry.partition(":")
    acceptance = [] if name == TREES else drafts.acceptance  # a tree's tokens have no such order
    row: Row = {
        "text": text,
        "proposer": name,
        "weights": "fp32" if weights == "none" else weights,
        "draft tokens": "auto" if length is None else str(length),
        "faster by": median(ratios),
        "slowest round": min(ratios),
        "fastest round": max(ratios),
        "tokens per step": num_tokens / max(num_draws, 1),
        "acceptance by position": " ".join(f"{value:.2f}" for value in acceptance) or "-",
        "draft token / plain step": drafts.token_seconds / plain_seconds,
        "step / plain step": step_seconds / plain_seconds,
        "ms per plain step": plain_seconds * 1e3,
        "repeated n-grams": sum(repeated) / len(repeated),
    }
    return row, sum(each.num_different for each in races)


@contextmanager
def arms(weights: str, entry: str) -> Iterator[tuple[Arm, Arm]]:
    """Plain decoding, and drafting with this proposer."""
    with tempfile.TemporaryDirectory() as folder:
        opened = [
            Arm(
                BASE,
                Path(folder),
                speculation=speculation,
                adapters={PIRATE: ADAPTERS[PIRATE]},
                quantization=Quantization(weights),
            )
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
        if num_drafted := sum(length for _, length in lengths):
            drafts.seconds.append(seconds / num_drafted)
        propose(control, *args)

    with (
        patch.object(Control, "observe", observing),
        patch.object(Control, "observe_proposals", proposing),
    ):
        yield drafts


if __name__ == "__main__":
    raise SystemExit(main())
