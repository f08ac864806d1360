"""Speculation on a device whose true costs are known, in modelled time: no model, no clock."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.messages import GenerationRequest, SpeculationParams
from loraplex.engine.prefix_cache import CacheNamespace
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.speculation.control import Choice, Control
from loraplex.engine.step_costs import StepCosts, StepShape

MAX_TOKENS = 8
NUM_FREE = 10_000


class Costs(NamedTuple):
    """Seconds of a step: linear in its rows, or flat until that many of them are computed."""

    step: float
    decode: float
    draft: float
    flat_rows: int = 0

    def seconds(self, shape: StepShape) -> float:
        rows = self.decode * shape.num_decodes + self.draft * shape.num_draft_tokens
        return self.step + max(rows, self.draft * self.flat_rows)


@dataclass
class Guesser:
    """A proposer whose tokens are right with a probability, given that the one before was."""

    right: dict[AdapterKey | None, float]
    call: float = 0.0
    request: float = 0.0
    token: float = 0.0
    supply: float = 1.0

    def expected(self, key: AdapterKey | None, num_tokens: int) -> float:
        right = self.right[key]
        return sum(right**place for place in range(1, num_tokens + 1))


def adapter(number: int) -> AdapterKey:
    return AdapterKey("tenant", f"sha256:{number}")


def make_request(
    number: int = 0,
    key: AdapterKey | None = None,
    speculation: SpeculationParams | None = None,
    max_tokens: int = 10**6,
) -> Request:
    submitted = GenerationRequest(
        str(number), "tenant", [1] * 8, SamplingParams(max_tokens=max_tokens), key,
        speculation=speculation,
    )  # fmt: skip
    request = Request(submitted, CacheNamespace("tenant", "runtime", key), 0, 0.0, None)
    request.num_computed_tokens = 100
    return request


@dataclass
class Device:
    """Runs requests step by step, as the engine does, and counts tokens and modelled seconds."""

    costs: Costs
    guessers: dict[str, Guesser]
    requests: list[Request]
    noise: float = 0.03
    num_free: int = NUM_FREE
    control: Control = field(init=False)
    num_tokens: int = 0
    seconds: float = 0.0
    guesses: list[int] = field(default_factory=list)
    """Guessed tokens of each step."""

    def __post_init__(self) -> None:
        self.rng = random.Random(1)
        self.learned = StepCosts()
        self.control = Control(list(self.guessers), max_tokens=MAX_TOKENS, costs=self.learned)
        for length in (16, 64, 32):  # prompts came first
            seconds = self.costs.step + self.costs.draft * length
            self.learned.observe(StepShape(length, 0, 0), seconds)

    def run(self, num_steps: int) -> float:
        """The rate over these steps, in tokens per second."""
        num_tokens, seconds = self.num_tokens, self.seconds
        for _ in range(num_steps):
            self.step()
        return (self.num_tokens - num_tokens) / (self.seconds - seconds)

    def step(self) -> None:
        choices = self.control.choose(self.requests, self.num_free)
        lengths, proposing = self._propose(choices)
        context = sum(request.num_computed_tokens for request in self.requests)
        shape = StepShape(0, len(self.requests), context, sum(lengths.values()))
        seconds = self.costs.seconds(shape) * self.rng.uniform(1 - self.noise, 1 + self.noise)
        for request, length in lengths.items():
            if length:
                accepted = range(self._accepted(request, choices[request].proposer, length))
                self.control.observe(request, choices[request].proposer, length, accepted)
                self.num_tokens += len(accepted)
        self.num_tokens += len(self.requests)
        self.learned.observe(shape, seconds)
        self.seconds += seconds + proposing
        self.guesses.append(shape.num_draft_tokens)

    def plain_rate(self) -> float:
        shape = StepShape(0, len(self.requests), 0, 0)
        return len(self.requests) / self.costs.seconds(shape)

    def _propose(self, choices: Mapping[Request, Choice]) -> tuple[dict[Request, int], float]:
        wanted: dict[str, list[tuple[Request, int]]] = defaultdict(list)
        for request, (proposer, num_tokens) in choices.items():
            has_draft = self.rng.random() < self.guessers[proposer].supply
            wanted[proposer].append((request, num_tokens if has_draft else 0))
        total = 0.0
        for proposer, drafts in wanted.items():
            it = self.guessers[proposer]
            seconds = it.call + it.request * len(drafts) + it.token * sum(n for _, n in drafts)
            self.control.observe_proposals(proposer, drafts, seconds)
            total += seconds
        return dict(draft for drafts in wanted.values() for draft in drafts), total

    def _accepted(self, request: Request, proposer: str, length: int) -> int:
        right = self.guessers[proposer].right[request.line]
        return next((n for n in range(length) if self.rng.random() >= right), length)


def best_fixed_rate(device: Device, proposer: str) -> float:
    """Of those that always guess the same number for each adapter, by expectation."""
    guesser, costs = device.guessers[proposer], device.costs
    counts: dict[AdapterKey | None, int] = defaultdict(int)
    for request in device.requests:
        counts[request.line] += 1
    return max(
        _fixed_rate(costs, guesser, counts, dict(zip(counts, lengths, strict=True)))
        for lengths in product(range(MAX_TOKENS + 1), repeat=len(counts))
    )


def _fixed_rate(
    costs: Costs,
    guesser: Guesser,
    counts: Mapping[AdapterKey | None, int],
    lengths: Mapping[AdapterKey | None, int],
) -> float:
    num_requests = sum(counts.values())
    num_asked = sum(counts[key] for key in counts if lengths[key])
    num_drafts = sum(counts[key] * lengths[key] for key in counts)
    won = sum(counts[key] * guesser.expected(key, lengths[key]) for key in counts)
    seconds = costs.seconds(StepShape(0, num_requests, 0, num_drafts))
    if num_asked:
        seconds += guesser.call + guesser.request * num_asked + guesser.token * num_drafts
    return (num_requests + won) / seconds
