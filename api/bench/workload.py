"""The workload of one benchmark run: random prompts, distributed round-robin over the models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Workload:
    """One run: `num_requests` requests, `concurrency` of them at a time."""

    models: Sequence[str]
    """Round-robin: request i goes to `models[i % len(models)]`."""
    num_requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    token_ids: range
    """The ids from which prompts are sampled."""
    seed: int


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a run."""

    model: str
    prompt: list[int]
    output_tokens: int


def load_requests(workload: Workload) -> list[LoadRequest]:
    """The run's requests: prompts that share no prefix, so that no prefix cache can help."""
    rng = Random(workload.seed)
    return [
        LoadRequest(
            model=workload.models[index % len(workload.models)],
            prompt=rng.choices(workload.token_ids, k=workload.prompt_tokens),
            output_tokens=workload.output_tokens,
        )
        for index in range(workload.num_requests)
    ]
