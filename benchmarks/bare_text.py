"""Text of the demo's base that repeats neither its prompt nor itself.

The base has learned the words of every style as bare text, without a question. So it continues the
opening of such a text with names and numbers of its own choice, where there is nothing to copy.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from random import Random

from benchmarks.speculation_arms import Arm, Job
from benchmarks.speculation_work import BASE

from loraplex.api.demo.task import ADAPTER_STYLES, Request
from loraplex.engine.text.tokenizer import Tokenizer

NGRAM = 3
MAX_REPEATED = 0.1
"""The most of an answer's n-grams that may occur before, so that it counts as not repeating."""
MIN_TOKENS = 12
"""Of an answer, so that it has steps to measure."""
_MIN_OPENING = 2
_BATCH_SIZE = 64


def openings(requests: Iterable[Request], tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    """For each request the first tokens, at most a third, of its answer in some adapter's style."""
    rng = Random(seed)
    for request in requests:
        token_ids = tokenizer.encode(request.answer(rng.choice(ADAPTER_STYLES)))
        yield token_ids[: rng.randint(_MIN_OPENING, max(len(token_ids) // 3, _MIN_OPENING))]


def repeated_share(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """The share of the answer's n-grams that occur earlier in the prompt or the answer."""
    tokens, first = [*prompt, *answer], max(len(prompt) - NGRAM + 1, 0)
    ngrams = [tuple(tokens[start : start + NGRAM]) for start in range(len(tokens) - NGRAM + 1)]
    seen, num_repeated = set(ngrams[:first]), 0
    for ngram in ngrams[first:]:
        num_repeated += ngram in seen
        seen.add(ngram)
    return num_repeated / max(len(ngrams) - first, 1)


def unrepeated_jobs(prompts: Iterable[list[int]], count: int, *, temperature: float) -> list[Job]:
    """Jobs with distinct answers of some length that repeat little. Raises ValueError if the
    prompts have fewer."""
    jobs: dict[tuple[int, ...], Job] = {}
    with _plain_arm() as arm:
        numbered = enumerate(prompts)
        while len(jobs) < count and (some := list(islice(numbered, _BATCH_SIZE))):
            asked = [Job(prompt, temperature=temperature, seed=seed) for seed, prompt in some]
            for job, answer in zip(asked, arm.run(asked).answers, strict=True):
                repeats = repeated_share(job.prompt, answer) > MAX_REPEATED
                if len(answer) >= MIN_TOKENS and not repeats:
                    jobs.setdefault(tuple(answer), job)
    if len(jobs) >= count:
        return list(jobs.values())[:count]
    raise ValueError(f"{len(jobs)} answers of the base repeat little, not {count}")


def write_own_texts(path: Path, prompts: Sequence[list[int]], *, seed: int) -> Path:
    """The base's own continuations of these prompts at temperature 1, as lines of text."""
    tokenizer = Tokenizer(BASE)
    with _plain_arm() as arm, path.open("w") as file:
        for start in range(0, len(prompts), _BATCH_SIZE):
            some = prompts[start : start + _BATCH_SIZE]
            jobs = [
                Job(prompt, temperature=1.0, seed=seed + number)
                for number, prompt in enumerate(some, start)
            ]
            for prompt, answer in zip(some, arm.run(jobs).answers, strict=True):
                text = tokenizer.decode([*prompt, *answer])
                file.write(json.dumps({"text": text}) + "\n")
    return path


@contextmanager
def _plain_arm() -> Iterator[Arm]:
    with tempfile.TemporaryDirectory() as folder:
        arm = Arm(BASE, Path(folder), max_num_seqs=_BATCH_SIZE)
        try:
            yield arm
        finally:
            arm.close()
