"""The adapters that have answered so often that a crash is probably not theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...adapters.identity import AdapterKey

PROOF_ANSWERS = 8
"""Successful answers without a crash between them. An adapter that ends the engine in one of three
requests passes with a probability of 4 %."""
PROOF_SECONDS = 2.0
"""From the first of them: of many requests that begin together, the short ones end first, and the
adapter may still end the engine in a long one."""
MAX_ADAPTERS = 20_000
"""The longest idle one is forgotten. With as many, about 6 MB."""


@dataclass(slots=True)
class _Answers:
    since: float
    number: int = 0
    are_proof: bool = False


class ProvenAdapters:
    """Counts each adapter's successful answers up to the proof."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: dict[AdapterKey, _Answers] = {}
        """In the order of the last answers."""

    def __contains__(self, key: AdapterKey) -> bool:
        answers = self._answers.get(key)
        return answers is not None and answers.are_proof

    def __iter__(self) -> Iterator[AdapterKey]:
        return (key for key, answers in self._answers.items() if answers.are_proof)

    def note_answer(self, key: AdapterKey) -> bool:
        """Whether this successful answer completes the proof."""
        answers = self._touch(key)
        answers.number += 1
        if answers.are_proof or answers.number < PROOF_ANSWERS:
            return False
        answers.are_proof = self._clock() - answers.since >= PROOF_SECONDS
        return answers.are_proof

    def note_proven(self, key: AdapterKey) -> None:
        """It has been proven elsewhere."""
        self._touch(key).are_proof = True

    def disprove(self, key: AdapterKey) -> None:
        """Its answers until now are no proof."""
        self._answers.pop(key, None)

    def _touch(self, key: AdapterKey) -> _Answers:
        answers = self._answers.pop(key, None) or _Answers(since=self._clock())
        self._answers[key] = answers
        if len(self._answers) > MAX_ADAPTERS:
            del self._answers[next(iter(self._answers))]
        return answers
