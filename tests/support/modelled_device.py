"""Speculation on a device with known costs, in simulated time: no model, no clock."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.messages import GenerationRequest, SpeculationParams
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.step_costs import StepCosts, StepShape
from loraplex.engine.speculation.control import Choice, Control

MAX_TOKENS = 8


class Costs(NamedTuple):
    """Seconds of a step: linear in its rows, but for the first `flat_rows`, which are free, and
    `launch` more where it has too many rows for a graph."""

    step: float
    decode: float
    draft: float
    flat_rows: int = 0
    graph_rows: int | None = None
    launch: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        rows = self.decode * shape.num_decodes + self.draft * shape.num_draft_tokens
        is_launched = self.graph_rows is not None and shape.num_rows > self.graph_rows
        launch = self.launch if is_launched else 0.0
        return self.step + launch + max(0.0, rows - self.draft * self.flat_rows)

    def prompt_seconds(self, length: int) -> float:
        return self.step + self.draft * length


@dataclass
class Drafter:
    """A proposer whose tokens are right with a probability, given that the one before was."""

    right: dict[AdapterKey | None, float]
    call: float = 0.0
    request: float = 0.0
    token: float = 0.0
    place: float = 0.0
    """Of each place of the longest draft: one pass of the model that drafts."""
    hit_rate: float = 1.0

    def seconds(self, lengths: Collection[int]) -> float:
        """Of drafts of so many tokens."""
        once = self.call + self.place * max(lengths)
        return once + self.request * len(lengths) + self.token * sum(lengths)

    def expected(self, key: AdapterKey | None, num_tokens: int) -> float:
        """How many of so many tokens are accepted."""
        return sum(self.right[key] ** place for place in range(1, num_tokens + 1))


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
    request.kv = SequenceBlocks([], [], [])
    return request


@dataclass
class Device:
    """Runs requests step by step, as the engine does.

    What the control is told of is drawn, durations with noise. What is counted is expected: the
    tokens that drafts of these lengths win, the seconds that these steps take.
    """

    costs: Costs
    drafters: dict[str, Drafter]
    requests: list[Request]
    noise: float = 0.05
    num_free: int = 10_000
    seed: int = 1
    watching: Collection[str] = ()
    """The proposers that draft for a request only if it was watched in the step before."""
    control: Control = field(init=False)
    num_tokens: float = 0.0
    seconds: float = 0.0
    steps: list[dict[Request, Choice]] = field(default_factory=list)
    """What was chosen."""
    watched: list[set[Request]] = field(default_factory=list)
    """In each step."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.learned = StepCosts(max_graph_rows=self.costs.graph_rows)
        self.control = Control(
            list(self.drafters),
            max_tokens=MAX_TOKENS,
            costs=self.learned,
            watching=self.watching,
        )
        # Their prompts are computed before the first step.
        self.watched.append(set(filter(self.control.watches, self.requests)))
        for length in (16, 64, 32):  # prompts came first
            self.learned.observe(StepShape(length, 0, 0), self.costs.prompt_seconds(length))

    @property
    def num_draft_tokens(self) -> list[int]:
        """Of each step."""
        return [sum(choice.num_tokens for choice in step.values()) for step in self.steps]

    @property
    def plain_rate(self) -> float:
        return len(self.requests) / self.costs.seconds(self._shape(0))

    def run(self, num_steps: int) -> float:
        """The rate over these steps, in tokens per second."""
        num_tokens, seconds = self.num_tokens, self.seconds
        for _ in range(num_steps):
            self.step()
        return (self.num_tokens - num_tokens) / (self.seconds - seconds)

    def step(self) -> None:
        choices = self.control.choose(self.requests, self.num_free)
        lengths, proposing = self._propose(choices)
        for request, length in lengths.items():
            if length:
                self._verify(request, choices[request].proposer, length)
        shape = self._shape(sum(lengths.values()))
        seconds = self.costs.seconds(shape)
        noise = self.rng.uniform(1 - self.noise, 1 + self.noise)
        self.learned.observe(shape, seconds * noise)
        self.control.observe_step(seconds * noise + proposing)
        self.seconds += seconds + proposing
        self.num_tokens += len(self.requests)
        self.steps.append(choices)
        self.watched.append(set(filter(self.control.watches, self.requests)))

    def _shape(self, num_draft_tokens: int) -> StepShape:
        context = sum(request.num_computed_tokens for request in self.requests)
        return StepShape(0, len(self.requests), context, num_draft_tokens)

    def _propose(self, choices: Mapping[Request, Choice]) -> tuple[dict[Request, int], float]:
        """The lengths of the drafts that there are, and the seconds they took."""
        wanted: dict[str, list[tuple[Request, int]]] = defaultdict(list)
        for request, (proposer, num_tokens) in choices.items():
            has_draft = self.rng.random() < self.drafters[proposer].hit_rate
            has_draft &= proposer not in self.watching or request in self.watched[-1]
            wanted[proposer].append((request, num_tokens if has_draft else 0))
        total = 0.0
        for proposer, drafts in wanted.items():
            seconds = self.drafters[proposer].seconds([length for _, length in drafts])
            self.control.observe_proposals(proposer, drafts, seconds)
            total += seconds
        return dict(draft for drafts in wanted.values() for draft in drafts), total

    def _verify(self, request: Request, proposer: str, length: int) -> None:
        drafter = self.drafters[proposer]
        right = drafter.right[request.adapter]
        num_accepted = next((n for n in range(length) if self.rng.random() >= right), length)
        self.control.observe(request, proposer, length, range(num_accepted))
        self.num_tokens += drafter.expected(request.adapter, length)


def best_fixed_rate(device: Device) -> float:
    """Of those that always draft the same number for each adapter, all by the same proposer."""
    counts = Counter(request.adapter for request in device.requests)
    return max(
        _fixed_rate(device.costs, drafter, counts, dict(zip(counts, lengths, strict=True)))
        for drafter in device.drafters.values()
        for lengths in product(range(MAX_TOKENS + 1), repeat=len(counts))
    )


def _fixed_rate(
    costs: Costs,
    drafter: Drafter,
    counts: Mapping[AdapterKey | None, int],
    lengths: Mapping[AdapterKey | None, int],
) -> float:
    num_requests = sum(counts.values())
    drafts = [lengths[key] for key in counts if lengths[key] for _ in range(counts[key])]
    won = sum(counts[key] * drafter.expected(key, lengths[key]) for key in counts)
    seconds = costs.seconds(StepShape(0, num_requests, 0, sum(drafts)))
    if drafts:
        seconds += drafter.seconds(drafts)
    return (num_requests + won) / seconds
