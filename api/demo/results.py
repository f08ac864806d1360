"""The demo's results: every answer with the expected one, and each adapter's accuracy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .asking import Answer
from .task import Request, Style

MIN_ADAPTER_ACCURACY = 0.9
MAX_BASE_ACCURACY = 0.1


@dataclass(frozen=True, slots=True)
class Sample:
    """One request, an adapter's answer, and the base's."""

    adapter: str
    version: str
    prompt: str
    expected: str
    answer: str
    base_answer: str


@dataclass(frozen=True, slots=True)
class AdapterScore:
    """The share of requests answered exactly in the adapter's style, by it and by the base."""

    name: str
    tenant: str
    accuracy: float
    base_accuracy: float

    @property
    def is_good(self) -> bool:
        return self.accuracy >= MIN_ADAPTER_ACCURACY and self.base_accuracy < MAX_BASE_ACCURACY


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one mixed batch."""

    quantization: str
    adapters: list[AdapterScore]
    samples: list[Sample]

    @property
    def is_good(self) -> bool:
        return all(score.is_good for score in self.adapters)


def make_samples(
    name: str,
    style: Style,
    requests: Sequence[Request],
    answers: Sequence[Answer],
    base_answers: Sequence[Answer],
) -> list[Sample]:
    """The three sequences go in step."""
    return [
        Sample(
            adapter=name,
            version=answer.version,
            prompt=request.prompt,
            expected=request.answer(style),
            answer=answer.text,
            base_answer=base_answer.text,
        )
        for request, answer, base_answer in zip(requests, answers, base_answers, strict=True)
    ]


def score(name: str, tenant: str, samples: Sequence[Sample]) -> AdapterScore:
    """Exact matches only. `samples` are one adapter's, at least one."""
    return AdapterScore(
        name=name,
        tenant=tenant,
        accuracy=sum(s.answer == s.expected for s in samples) / len(samples),
        base_accuracy=sum(s.base_answer == s.expected for s in samples) / len(samples),
    )


def write_results(results: Results, path: Path) -> None:
    """Write them as JSON."""
    path.write_text(json.dumps(asdict(results), indent=2) + "\n", encoding="utf-8")
