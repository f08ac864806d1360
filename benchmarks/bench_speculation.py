"""Speculative and plain decoding: the speedup of suitable work, and the cost for unsuitable work.

    make bench-speculation [ARGS="--device cuda"]

Friendly: the demo's base and adapters on the demo's own tasks, by proposer and batch size, after 50
steps of that kind and size in which the engine has learned what pays off. The bar is 0.97, because
a bad or expensive proposer must not slow down any request. Hostile: an adapter whose draft tokens
are never accepted, from an engine's first step and from its 51st on; the bar is 0.97 too. Full: an
acceptance rate of one half, in batches where verification does not pay off; bar 0.97. Both variants
alternate step by step on the same requests, and their answers are compared. Figures are medians
over rounds, with their 95 % confidence interval (bootstrap). The speed is that of decoding, without
prompts. Finally, the duration of a step that verifies a number of draft tokens for each request,
relative to one without, in a larger model with free drafts.

On CUDA the demo's base uses prompt lookup only. There, the full case is the 8 B base with random
weights, for single streams and in batches, with drafts of a given acceptance rate, or zero.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

from benchmarks.drawn_base import LARGE_SHAPE, base_of
from benchmarks.report import MODELS, Row, print_report
from benchmarks.speculation_arms import Arm, Decoding, Job, Race, race, tokens_per_second
from benchmarks.speculation_work import (
    ADAPTERS,
    BASE,
    NeverRight,
    demo_proposers,
    demo_work,
)
from benchmarks.timed_engine import MEASURED_SHAPE, SMOKE_SHAPE, random_prompt

from loraplex.api.bench.models import BaseShape
from support.speculation import ScriptedProposer, scripted

MAX_DRAFT_TOKENS = 8
HOSTILE_ADAPTER = "pirate"
NUM_LEARNING_STEPS = 50
"""So soon drafting in vain must have stopped."""
NUM_PROMPT_TOKENS = 64
NUM_RESAMPLES = 2_000
VOCAB_SIZE = 2_048
"""Of the demo's base."""


@dataclass(frozen=True)
class Plan:
    shape: BaseShape = MEASURED_SHAPE
    """Of the random model in which checking is measured."""
    work: Sequence[str] = ("echo", "long echo", "sql")
    proposers: Sequence[str] = ("ngram", "early_exit", "medusa", "medusa_tree", "all")
    batch_sizes: Sequence[int] = (1, 4, 16)
    least_jobs: int = 8
    """Of a round: small batches follow one another."""
    rounds: int = 3
    learning_steps: int = NUM_LEARNING_STEPS
    """At least, before the rounds of one kind of work and batch size."""
    head_steps: int = 300
    """Of training Medusa's heads."""
    hostile_batch_sizes: Sequence[int] = (1, 4, 16)
    hostile_tokens: int = 250
    hostile_rounds: int = 15
    full_batch_sizes: Sequence[int] = (16, 32)
    full_right: Sequence[float] = (0.5,)
    """How likely a draft token is right behind right ones."""
    full_tokens: int = 120
    full_rounds: int = 1
    cost_batch_sizes: Sequence[int] = (1, 4, 16)
    draft_sizes: Sequence[int] = (0, 1, 2, 3, 4, 6, 8)
    cycles: int = 12
    """Steps of each draft size."""


SMOKE = Plan(
    SMOKE_SHAPE,
    work=("echo", "json"),
    proposers=("all",),
    batch_sizes=(1,),
    least_jobs=1,
    rounds=1,
    learning_steps=1,
    head_steps=10,
    hostile_batch_sizes=(2,),
    hostile_tokens=NUM_LEARNING_STEPS + 10,
    hostile_rounds=1,
    full_batch_sizes=(4,),
    full_tokens=20,
    cost_batch_sizes=(1,),
    draft_sizes=(0, 2),
    cycles=2,
)


CUDA = Plan(
    LARGE_SHAPE,
    proposers=("ngram",),
    batch_sizes=(1, 8, 32),
    hostile_batch_sizes=(),
    full_batch_sizes=(1, 8, 32),
    full_right=(0.8, 0.0),
    full_rounds=3,
    cost_batch_sizes=(1, 8, 32),
    draft_sizes=(0, 1, 2, 4, 6),
)
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"dtype": "float32"},
    "cuda": {"dtype": "bfloat16", "kv_cache_bytes": 2 << 30, "max_num_seqs": 32},
}
"""Of the engines that serve the plan's shape, by their device."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What some races of the same kind say."""

    part: str
    work: str
    proposer: str
    batch_size: int
    rounds: Sequence[Sequence[Race]]
    first_step: int = 0
    """Steps before it are not counted."""

    @property
    def races(self) -> list[Race]:
        return [race for races in self.rounds for race in races]

    @property
    def plain_speeds(self) -> list[float]:
        """Tokens per second of each round."""
        return [self._speed([race.plain for race in races]) for races in self.rounds]

    @property
    def speeds(self) -> list[float]:
        return [self._speed([race.speculative for race in races]) for races in self.rounds]

    @property
    def ratios(self) -> list[float]:
        """Of each round: its arms took turns, so they met the same machine."""
        speeds = zip(self.speeds, self.plain_speeds, strict=True)
        return [drafting / plain for drafting, plain in speeds]

    @property
    def speed_up(self) -> float:
        return median(self.ratios)

    @property
    def row(self) -> Row:
        drafting = [race.speculative for race in self.races]
        drafted = sum(each.num_draft_tokens for each in drafting)
        accepted = sum(each.num_accepted_tokens for each in drafting)
        least, most = interval_of_median(self.ratios)
        return {
            "part": self.part,
            "work": self.work,
            "proposer": self.proposer,
            "batch": self.batch_size,
            "plain tokens/s": median(self.plain_speeds),
            "tokens/s": median(self.speeds),
            "faster by": self.speed_up,
            "at least": least,
            "at most": most,
            "mean accepted length": mean(each.mean_accepted_length for each in drafting),
            "acceptance rate": accepted / drafted if drafted else 0.0,
        }

    def _speed(self, decodings: Sequence[Decoding]) -> float:
        return tokens_per_second(decodings, first_step=self.first_step)


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """The bootstrap's 95 % interval of the median over rounds."""
    rng = Random(0)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    return medians[round(0.025 * NUM_RESAMPLES)], medians[round(0.975 * NUM_RESAMPLES) - 1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: whether it runs")
    parser.add_argument("--models", type=Path, default=MODELS, help="where bases are kept")
    parser.add_argument("--device", choices=CONFIGS, default="cpu")
    options = parser.parse_args(arguments)
    options.models.mkdir(parents=True, exist_ok=True)
    plan = CUDA if options.device == "cuda" else Plan()
    figures, costs = run(SMOKE if options.smoke else plan, options.models, options.device)
    races = {each for figure in figures for each in figure.races}
    parts = dict.fromkeys(figure.part for figure in figures)
    print_report(
        "speculation",
        [figure.row for figure in figures],
        ("cost_of_checking", costs),
        device=options.device,
        single_stream_faster_by=max(
            figure.speed_up
            for figure in figures
            if figure.part == "friendly" and figure.batch_size == 1
        ),
        **{f"{part.replace(' ', '_')}_least": least(figures, part) for part in parts},
        near_ties=sum(each.num_near_ties for each in races),
        requests_answered_differently=sum(each.num_different for each in races),
    )
    return 0


def run(plan: Plan, models: Path, device: str) -> tuple[list[Figure], list[Row]]:
    """All races, and what checking draft tokens costs."""
    proposers = demo_proposers(models, plan.proposers, num_steps=plan.head_steps)
    work = demo_work()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        figures = [
            *shown(friendly(plan, proposers, work, directory, device)),
            *shown(hostile(plan, work, directory, device)),
        ]
        with base_of(plan.shape, models, device=device, is_certain=True) as model:
            figures += shown(full(plan, model, directory, device))
            return figures, verification_costs(plan, model, directory, device)


def least(figures: Iterable[Figure], part: str) -> float:
    return min(figure.speed_up for figure in figures if figure.part == part)


def shown(figures: Iterable[Figure]) -> Iterator[Figure]:
    """Tell of each as it is measured: all of them take minutes."""
    for figure in figures:
        sys.stderr.write(
            f"{figure.part}, {figure.work}, {figure.proposer}, batch {figure.batch_size}: "
            f"{figure.speed_up:.2f}\n"
        )
        yield figure


def friendly(
    plan: Plan,
    proposers: Mapping[str, Sequence[str]],
    work: Mapping[str, list[Job]],
    directory: Path,
    device: str,
) -> Iterator[Figure]:
    """Every proposer on every kind of work at every batch size."""
    for name in plan.proposers:
        with demo_arms(directory, proposers[name], device) as arms:
            for kind in plan.work:
                jobs = work[kind]
                for size in plan.batch_sizes:
                    _learn(arms, jobs[::-1], size, plan.learning_steps)
                    num_jobs = max(plan.least_jobs, size)
                    rounds = [
                        [
                            race(*arms, jobs[start : start + size])
                            for start in range(begin, begin + num_jobs, size)
                        ]
                        for begin in range(0, plan.rounds * num_jobs, num_jobs)
                    ]
                    yield Figure("friendly", kind, name, size, rounds)


def _learn(arms: tuple[Arm, Arm], jobs: Sequence[Job], size: int, num_steps: int) -> None:
    """Race on these jobs, the first ones first, until the drafting arm has run so many steps."""
    for start in cycle(range(0, len(jobs) - size + 1, size)):
        num_steps -= len(race(*arms, jobs[start : start + size]).speculative.step_seconds)
        if num_steps <= 0:
            return


def hostile(
    plan: Plan, work: Mapping[str, list[Job]], directory: Path, device: str
) -> Iterator[Figure]:
    """An adapter whose draft tokens never hold, each time in engines that have seen nothing
    else."""
    for size in plan.hostile_batch_sizes:
        jobs = [
            Job(job.prompt, HOSTILE_ADAPTER, num_tokens=plan.hostile_tokens)
            for job in work[HOSTILE_ADAPTER][:size]
        ]
        rounds = [[_hostile_race(jobs, directory, device)] for _ in range(plan.hostile_rounds)]
        for part, first_step in (("hostile at once", 0), ("hostile", NUM_LEARNING_STEPS)):
            yield Figure(part, HOSTILE_ADAPTER, NeverRight.name, size, rounds, first_step)


def _hostile_race(jobs: Sequence[Job], directory: Path, device: str) -> Race:
    proposer = NeverRight(VOCAB_SIZE)
    with scripted(proposer), demo_arms(directory, [proposer.name], device) as arms:
        return race(*arms, jobs)


def full(plan: Plan, model: Path, directory: Path, device: str) -> Iterator[Figure]:
    """So many of all draft tokens hold, in the larger model; the control has met them before."""
    if not plan.full_batch_sizes:
        return
    proposer = ScriptedProposer({}, vocab_size=plan.shape.vocab_size)
    arms = open_arms(model, directory, [proposer.name], device=device, **CONFIGS[device])
    with scripted(proposer), arms as (plain, drafting):
        for right in plan.full_right:
            proposer.error = 1 - right
            for size in plan.full_batch_sizes:
                jobs = random_jobs(plan.shape, size, num_tokens=plan.full_tokens)
                answers = plain.run(jobs).answers
                proposer.answers = {str(index): answer for index, answer in enumerate(answers)}
                race(plain, drafting, jobs)
                rounds = [[race(plain, drafting, jobs)] for _ in range(plan.full_rounds)]
                yield Figure("full", f"{right:.0%} right", proposer.name, size, rounds)


def verification_costs(plan: Plan, model: Path, directory: Path, device: str) -> list[Row]:
    """By batch size what checking so many draft tokens a request adds to a step; drafts are
    free."""
    proposer = NeverRight(plan.shape.vocab_size)
    config = {"device": device, "speculation": [proposer.name], **CONFIGS[device]}
    with scripted(proposer), open_arm(model, directory, **config) as arm:
        return [_verification_cost(plan, arm, proposer, size) for size in plan.cost_batch_sizes]


def _verification_cost(plan: Plan, arm: Arm, proposer: NeverRight, size: int) -> Row:
    """Each step checks another number of draft tokens, so that all meet the same machine."""
    num_steps = len(plan.draft_sizes) * (1 + plan.cycles)
    jobs = random_jobs(plan.shape, size, num_tokens=2 * num_steps)
    seconds: dict[int, list[float]] = {number: [] for number in plan.draft_sizes}
    arm.begin(jobs, num_forced=max(plan.draft_sizes))
    for _ in range(1 + plan.cycles):
        for proposer.num_tokens in plan.draft_sizes:
            arm.step()
            seconds[proposer.num_tokens].append(arm.decoding.step_seconds[-1])
    arm.end()
    medians = {number: median(times[1:]) for number, times in seconds.items()}
    ratios = {f"{number} draft tokens": medians[number] / medians[0] for number in plan.draft_sizes}
    return {"batch": size, "ms with none": 1e3 * medians[0], **ratios}


def random_jobs(shape: BaseShape, count: int, *, num_tokens: int) -> list[Job]:
    rng = Random(1)
    return [
        Job(random_prompt(rng, shape, NUM_PROMPT_TOKENS), num_tokens=num_tokens)
        for _ in range(count)
    ]


@contextmanager
def open_arm(model: Path, directory: Path, **config: Any) -> Iterator[Arm]:
    arm = Arm(model, directory, max_draft_tokens=MAX_DRAFT_TOKENS, **config)
    try:
        yield arm
    finally:
        arm.close()


@contextmanager
def open_arms(
    model: Path, directory: Path, speculation: Sequence[str], **config: Any
) -> Iterator[tuple[Arm, Arm]]:
    """One that decodes plainly and one that proposes."""
    with (
        open_arm(model, directory, **config) as plain,
        open_arm(model, directory, speculation=speculation, **config) as drafting,
    ):
        yield plain, drafting


@contextmanager
def demo_arms(
    directory: Path, speculation: Sequence[str], device: str
) -> Iterator[tuple[Arm, Arm]]:
    with open_arms(BASE, directory, speculation, adapters=ADAPTERS, device=device) as arms:
        yield arms


if __name__ == "__main__":
    sys.exit(main())
