"""Speculation on one device: the tokens of plain decoding, and the model's own probabilities."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import torch
from benchmarks.speculation_arms import Arm, Decoding, Job
from torch import Tensor

from loraplex.engine.config import Acceptance
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.prefix_cache import CacheNamespace
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.speculation.acceptors import Acceptor, make_acceptor
from loraplex.engine.speculation.draft import Draft
from support.models import make_adapter, make_tiny_llama
from support.speculation import ScriptedProposer, scripted

PROPOSERS = ("ngram", ScriptedProposer.name)
"""What the tested engines' configuration says."""
ACCEPTANCES = (Acceptance.COUPLED,)
TEMPERATURES = (0.0, 0.7, 1.3)
NUM_JOBS = 18
ANSWER_TOKENS = 40
ERROR = 0.3
"""Of the scripted guesses so many are wrong."""
NUM_DRAWS = 4_000
LEAST_P_VALUE = 1e-4


def check_speculation(directory: Path, *, device: str) -> dict[str, Any]:
    """Greedy and sampled requests, base and adapters, in one batch; then each acceptor alone."""
    proposers = _check_identity(directory, device)
    p_values = {
        acceptance.value: p_value(make_acceptor(acceptance), device=device)
        for acceptance in ACCEPTANCES
    }
    is_same = all(not found["different_beyond_near_ties"] for found in proposers.values())
    some_held = all(found["accepted_tokens"] for found in proposers.values())
    is_fair = all(value > LEAST_P_VALUE for value in p_values.values())
    return {"ok": is_same and some_held and is_fair, "proposers": proposers, "p_values": p_values}


def _check_identity(directory: Path, device: str) -> dict[str, dict[str, int]]:
    base = make_tiny_llama(directory / "guessed-base")
    adapters = {
        f"r{rank}": make_adapter(base, directory / f"guessed-r{rank}", seed=rank, r=rank)
        for rank in (4, 16)
    }
    jobs = _make_jobs([None, *adapters])

    def open_arm(speculation: str | None = None) -> Arm:
        return Arm(base, directory, speculation=speculation, adapters=adapters, device=device)

    found = {}
    with closing(open_arm()) as plain:
        expected = plain.run(jobs).answers
        answers = {str(index): answer for index, answer in enumerate(expected)}
        with scripted(ScriptedProposer(answers, error=ERROR)):
            for name in PROPOSERS:
                with closing(open_arm(name)) as arm:
                    found[name] = _compare(plain, jobs, expected, arm.run(jobs))
    return found


def _compare(
    plain: Arm, jobs: list[Job], expected: list[list[int]], actual: Decoding
) -> dict[str, int]:
    parted = [
        plain.is_near_tie(job, *answers)
        for job, *answers in zip(jobs, expected, actual.answers, strict=True)
        if answers[0] != answers[1]
    ]
    return {
        "tokens": sum(map(len, actual.answers)),
        "draft_tokens": actual.num_draft_tokens,
        "accepted_tokens": actual.num_accepted_tokens,
        "different_beyond_near_ties": parted.count(False),
        "near_ties": parted.count(True),
    }


def _make_jobs(adapters: list[str | None]) -> list[Job]:
    """Prompts that repeat themselves, so that there is something to look up."""
    rng = Random(0)
    phrase = [rng.randrange(256) for _ in range(7)]
    return [
        Job(
            [*phrase * rng.randint(1, 6), *phrase[: rng.randint(1, 6)]],
            adapters[index % len(adapters)],
            num_tokens=ANSWER_TOKENS,
            temperature=TEMPERATURES[index // len(adapters) % len(TEMPERATURES)],
            seed=index,
        )
        for index in range(NUM_JOBS)
    ]


def p_value(acceptor: Acceptor, *, device: str, num_draws: int = NUM_DRAWS) -> float:
    """Of a chi-square test: whether first tokens, and second ones where the first guess held, come
    as often as the target's probabilities say, whatever was guessed by others."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 8, generator=generator)
    guessed = torch.randn(2, 8, generator=generator).softmax(-1)
    drafts = guessed.multinomial(num_draws, replacement=True, generator=generator).T.tolist()
    probabilities = guessed.to(device)
    requests = [
        _make_request(seed, Draft(tuple(tokens), probabilities=probabilities))
        for seed, tokens in enumerate(drafts)
    ]
    accepted = acceptor.accept(requests, logits.repeat(num_draws, 1).to(device))
    firsts = [found.token_ids[0] for found in accepted]
    seconds = [found.token_ids[1] for found in accepted if found.path]
    expected = logits.softmax(-1)
    statistic = _chi_square(firsts, expected[0]) + _chi_square(seconds, expected[1])
    degrees = 2.0 * (logits.shape[-1] - 1)
    return float(torch.special.gammaincc(torch.tensor(degrees / 2), statistic / 2))


def _chi_square(tokens: list[int], probabilities: Tensor) -> Tensor:
    counts = torch.tensor(tokens).bincount(minlength=len(probabilities))
    expected = len(tokens) * probabilities
    return ((counts - expected) ** 2 / expected).sum()


def _make_request(seed: int, draft: Draft) -> Request:
    submitted = GenerationRequest(str(seed), "acme", [1], SamplingParams())
    namespace = CacheNamespace("acme", "runtime", None)
    request = Request(submitted, namespace, seed=seed, arrival_time=0.0, adapter_tier=None)
    request.draft = draft
    return request
