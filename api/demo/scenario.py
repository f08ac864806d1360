"""The demo's scenario: two tenants push adapters, and one mixed batch answers for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..local.installation import Installation, TenantAccess
from .asking import Answer, Answers, Question, ask_all
from .manifest import WEIGHTS
from .recipe import BASE_NAME
from .results import AdapterScore, Results, Sample, make_samples, score
from .task import Request, Style, held_out_requests

NUM_REQUESTS = 60
SHARED_NAME = "assistant"
"""Both tenants own an adapter of this name, and mean different weights by it."""


@dataclass(frozen=True, slots=True)
class PushedAdapter:
    """An adapter that a tenant pushed, and the style it answers in."""

    tenant: TenantAccess
    name: str
    style: Style
    version: str


@dataclass(frozen=True, slots=True)
class Pushed:
    """The result of the pushes."""

    adapters: list[PushedAdapter]
    namesakes: list[PushedAdapter]
    """One per tenant, all called `SHARED_NAME`."""


@dataclass(frozen=True, slots=True)
class AdapterOutcome:
    """One adapter's part of the mixed batch."""

    adapter: PushedAdapter
    score: AdapterScore
    samples: list[Sample]
    answers: list[Answer]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of the mixed batch."""

    quantization: str
    """How the base was quantized while it was loaded, or `none`."""
    adapters: list[AdapterOutcome]
    num_requests: int
    output_tokens_per_second: float
    namesakes: list[tuple[PushedAdapter, str]]
    """Each namesake's answer to one and the same prompt."""

    @property
    def results(self) -> Results:
        return Results(
            quantization=self.quantization,
            adapters=[part.score for part in self.adapters],
            samples=[sample for part in self.adapters for sample in part.samples],
        )

    @property
    def is_good(self) -> bool:
        """Every adapter is right often enough, the base is not, and the namesakes differ."""
        answers = {answer for _, answer in self.namesakes}
        return self.results.is_good and len(answers) == len(self.namesakes)


def push_all(installation: Installation) -> Pushed:
    """Make two tenants and push their adapters."""
    acme, globex = (installation.create_tenant(slug) for slug in ("acme", "globex"))

    def push(tenant: TenantAccess, style: Style, name: str) -> PushedAdapter:
        version = installation.push(tenant, WEIGHTS / style, name)
        return PushedAdapter(tenant=tenant, name=name, style=style, version=version)

    return Pushed(
        adapters=[
            push(acme, Style.SQL, "sql"),
            push(acme, Style.JSON, "json"),
            push(globex, Style.PIRATE, "pirate"),
        ],
        namesakes=[push(acme, Style.SQL, SHARED_NAME), push(globex, Style.PIRATE, SHARED_NAME)],
    )


def num_questions(pushed: Pushed) -> int:
    """The number of requests that `ask_mixed` sends."""
    return NUM_REQUESTS * (len(pushed.adapters) + 1) + len(pushed.namesakes)


def ask_mixed(
    pushed: Pushed, *, url: str, quantization: str, on_answer: Callable[[], None]
) -> Outcome:
    """Ask every adapter and the base the same held-out requests, all in one stream of batches.

    `quantization`: how the server has quantized the base, or `none`.
    """
    requests = held_out_requests(NUM_REQUESTS)
    questions = _questions(pushed, requests)
    answers = asyncio.run(ask_all(questions, base_url=f"{url}/v1", on_answer=on_answer))
    return _outcome(pushed, requests, answers, quantization)


def _questions(pushed: Pushed, requests: Sequence[Request]) -> list[Question]:
    """For each request the base and every adapter, and at the end each namesake once."""
    base_key = pushed.adapters[0].tenant.api_key
    asked = [(base_key, BASE_NAME), *((a.tenant.api_key, a.name) for a in pushed.adapters)]
    mixed = [
        Question(api_key=key, model=model, prompt=request.prompt)
        for request in requests
        for key, model in asked
    ]
    namesakes = [
        Question(api_key=a.tenant.api_key, model=a.name, prompt=requests[0].prompt)
        for a in pushed.namesakes
    ]
    return mixed + namesakes


def _outcome(
    pushed: Pushed, requests: Sequence[Request], asked: Answers, quantization: str
) -> Outcome:
    """Take the answers apart again, in the order of `_questions`."""
    num_mixed = len(requests) * (len(pushed.adapters) + 1)
    mixed, namesakes = asked.answers[:num_mixed], asked.answers[num_mixed:]
    base_answers, *adapters_answers = (
        mixed[index :: len(pushed.adapters) + 1] for index in range(len(pushed.adapters) + 1)
    )
    return Outcome(
        quantization=quantization,
        adapters=[
            _adapter_outcome(adapter, requests, answers, base_answers)
            for adapter, answers in zip(pushed.adapters, adapters_answers, strict=True)
        ],
        num_requests=len(asked.answers),
        output_tokens_per_second=asked.output_tokens_per_second,
        namesakes=[
            (adapter, answer.text)
            for adapter, answer in zip(pushed.namesakes, namesakes, strict=True)
        ],
    )


def _adapter_outcome(
    adapter: PushedAdapter,
    requests: Sequence[Request],
    answers: list[Answer],
    base_answers: Sequence[Answer],
) -> AdapterOutcome:
    samples = make_samples(adapter.name, adapter.style, requests, answers, base_answers)
    return AdapterOutcome(
        adapter=adapter,
        score=score(adapter.name, adapter.tenant.slug, samples),
        samples=samples,
        answers=answers,
    )
