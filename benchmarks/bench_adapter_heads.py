"""An EAGLE head of the base and heads trained further under an adapter: acceptance and speed.

    make bench-adapter-heads

The demo's adapters answer the base's questions in words of their own. `loraplex drafts train
--start-from --adapter` trains the head of `bench_drafts` further on an adapter's sampled answers.
Each head drafts for the base and for the adapter on held-out questions: both decode step by step in
turn with plain decoding, and their answers are compared. `held-out acceptance` is that of draft
tokens at temperature 0 in sampled answers, by position, of those that were reached. Figures are
medians of the rounds of one run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.bench_drafts import SMOKE as SMOKE_DRAFTS
from benchmarks.bench_drafts import Plan as DraftsPlan
from benchmarks.bench_drafts import counted, trained_head
from benchmarks.report import MODELS, Row, print_report
from benchmarks.speculation_arms import Arm, Job, race, tokens_per_second
from benchmarks.speculation_work import ADAPTERS, BASE, demo_work

from loraplex.api.demo.task import Request, Style, held_out_requests, training_requests
from loraplex.engine.checkpoint.base_identity import compute_base_id
from loraplex.engine.checkpoint.weights import load_config, load_weights
from loraplex.engine.speculation.adapted_base import with_adapter
from loraplex.engine.speculation.eagle_checkpoint import load_head
from loraplex.engine.speculation.eagle_training import (
    DEFAULT_DEPTH,
    TrainedEagle,
    eagle_accuracies,
)
from loraplex.engine.speculation.training_texts import read_texts
from loraplex.engine.text.tokenizer import Tokenizer

MAX_TOKENS = 160
BATCH_SIZE = 64
BASES_HEAD = "base's"


@dataclass(frozen=True, slots=True)
class Plan:
    bases_head: DraftsPlan = field(default_factory=DraftsPlan)
    adapters: Sequence[str] = ("pirate", "sql")
    train_steps: int = 300
    num_texts: int = 1_500
    num_held_out: int = 64
    lengths: Sequence[int | None] = (3, None)
    """Draft tokens per step; None: the engine chooses."""
    num_jobs: int = 4
    """Of a round."""
    rounds: int = 5


SMOKE = Plan(SMOKE_DRAFTS, ("sql",), 2, 8, 4, (2,), num_jobs=1, rounds=1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: whether it runs")
    parser.add_argument("--models", type=Path, default=MODELS, help="where heads are kept")
    options = parser.parse_args(arguments)
    plan = SMOKE if options.smoke else Plan()
    bases_head = trained_head(options.models, plan.bases_head)
    rows: list[Row] = []
    gains: dict[str, float] = {}
    num_different = 0
    for adapter in plan.adapters:
        heads = {BASES_HEAD: bases_head}
        heads[adapter] = adapters_head(options.models, bases_head, adapter, plan)
        for writer in (None, adapter):
            learned = held_out_acceptance(heads, writer, plan)
            for name, head in heads.items():
                for length in plan.lengths:
                    row, different = measured(plan, writer, name, head, length)
                    rows.append({**row, "held-out acceptance": learned[name]})
                    sys.stderr.write(f"{rows[-1]}\n")
                    num_different += different
        own = {name: best(rows, adapter, name) for name in heads}
        gains[adapter] = own[adapter] / own[BASES_HEAD]
    print_report(
        "adapter-heads",
        rows,
        gain_over_the_bases_head=min(gains.values()),
        requests_answered_differently=num_different,
    )
    return 0


def best(rows: Sequence[Row], writer: str, head: str) -> float:
    """Over plain decoding, at the length that suits this head best."""
    return max(
        float(str(row["faster by"]))
        for row in rows
        if row["text of"] == writer and row["head"] == head
    )


def adapters_head(folder: Path, bases_head: Path, adapter: str, plan: Plan) -> Path:
    """A head in `folder`, trained further by the command unless it is there."""
    head = folder / f"demo-eagle-{adapter}-{plan.train_steps}"
    if (head / "config.json").exists():
        return head
    with tempfile.TemporaryDirectory() as data:
        requests = islice(training_requests(41), plan.num_texts)
        texts = write_answers(Path(data) / "texts.jsonl", requests, adapter)
        options: dict[str, object] = {
            "model": BASE,
            "kind": "eagle",
            "start-from": bases_head,
            "adapter": ADAPTERS[adapter],
            "data": texts,
            "out": head,
            "steps": plan.train_steps,
            "batch-size": 8,
            "max-tokens": MAX_TOKENS,
            "learning-rate": 2e-3,
            "device": "cpu",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "loraplex", "drafts", "train", *words]
        trained = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    sys.stderr.write(trained.stdout)
    return head


def write_answers(path: Path, requests: Iterable[Request], adapter: str | None) -> Path:
    """The answers of the adapter, or of the base, at temperature 1, as lines of messages."""
    tokenizer, seed = Tokenizer(BASE), 0
    pending = iter(requests)
    with tempfile.TemporaryDirectory() as folder, path.open("w") as file:
        arm = Arm(BASE, Path(folder), adapters=ADAPTERS, max_num_seqs=BATCH_SIZE)
        while some := list(islice(pending, BATCH_SIZE)):
            chats = [[{"role": "user", "content": request.prompt}] for request in some]
            jobs = [
                Job(tokenizer.encode_chat(chat), adapter, temperature=1.0, seed=seed + number)
                for number, chat in enumerate(chats)
            ]
            seed += len(jobs)
            for chat, answer in zip(chats, arm.run(jobs).answers, strict=True):
                said = {"role": "assistant", "content": tokenizer.decode(answer)}
                file.write(json.dumps({"messages": [*chat, said]}) + "\n")
        arm.close()
    return path


def held_out_acceptance(heads: dict[str, Path], writer: str | None, plan: Plan) -> dict[str, str]:
    """By head and position, on held-out answers of this writer, and under it."""
    with tempfile.TemporaryDirectory() as data:
        requests = held_out_requests(plan.num_held_out)
        path = write_answers(Path(data) / "texts.jsonl", requests, writer)
        texts = read_texts(path, Tokenizer(BASE), max_tokens=MAX_TOKENS)
    model: Any = load_weights(BASE, load_config(BASE), torch.float32, torch.device("cpu"))
    if writer is not None:
        model = with_adapter(model, ADAPTERS[writer])
    found = {}
    for name, path in heads.items():
        loaded = load_head(
            path,
            hidden_size=model.config.hidden_size,
            vocab_size=model.config.vocab_size,
            num_layers=model.config.num_hidden_layers,
            base_id=compute_base_id(BASE),
            dtype=torch.float32,
        )
        trained = TrainedEagle(loaded.head, loaded.layers)
        shares = eagle_accuracies(model, trained, texts, DEFAULT_DEPTH)
        found[name] = " ".join(f"{share:.2f}" for share in shares)
    return found


def measured(
    plan: Plan, writer: str | None, name: str, head: Path, length: int | None
) -> tuple[Row, int]:
    """Races of one head, and how many answers differed."""
    work = demo_work()[writer or Style.ECHO.value]
    jobs = work[: plan.num_jobs * (plan.rounds + 1)]
    with tempfile.TemporaryDirectory() as folder:
        plain, drafting = (
            Arm(BASE, Path(folder), adapters=ADAPTERS, speculation=speculation)
            for speculation in ((), (f"eagle:{head}",))
        )
        # Where the engine chooses, it has learned before.
        for job in jobs[: plan.num_jobs]:
            race(plain, drafting, [job], num_forced=length)
        with counted() as drafts:
            rounds = [
                [race(plain, drafting, [job], num_forced=length) for job in some]
                for some in (
                    jobs[start : start + plan.num_jobs]
                    for start in range(plan.num_jobs, len(jobs), plan.num_jobs)
                )
            ]
        plain.close()
        drafting.close()
    races = [each for some in rounds for each in some]
    speeds = [tokens_per_second([each.speculative for each in some]) for some in rounds]
    plain_speeds = [tokens_per_second([each.plain for each in some]) for some in rounds]
    ratios = [speed / plain for speed, plain in zip(speeds, plain_speeds, strict=True)]
    row: Row = {
        "text of": writer or "base",
        "head": name,
        "draft tokens": "auto" if length is None else str(length),
        "faster by": median(ratios),
        "slowest round": min(ratios),
        "fastest round": max(ratios),
        "tokens/s": median(speeds),
        "plain tokens/s": median(plain_speeds),
        "acceptance by position": " ".join(f"{value:.2f}" for value in drafts.acceptance) or "-",
    }
    return row, sum(each.num_different for each in races)


if __name__ == "__main__":
    raise SystemExit(main())
