"""The training data of the demo's models, generated without any download.

The base is first trained only to repeat lists of random words. Within a hundred steps this forms
the attention pattern of looking up a word, on which every answer relies and which the adapters
change; mixed with other data from the start, it takes ten times as long. Then half of the data is
the task itself, answered as an echo; a third is lists again, plain and quoted; the rest is the
words of each style as bare text, never as an answer, and some English.
"""

from __future__ import annotations

import ast
import json
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from .task import ADAPTER_STYLES, FIELDS, NUMBERS, TABLES, Request, Style, training_requests

DOCSTRING_CHARS = 600_000
PASSAGE_CHARS = 120
NUM_TOKENIZER_REQUESTS = 4_000
NUM_COMMON_WORDS = 150


@dataclass(frozen=True, slots=True)
class Example:
    """An answer to learn; without a prompt it is bare text."""

    prompt: str | None
    answer: str


def style_examples(style: Style, seed: int) -> Iterator[Example]:
    """The training data of one adapter: an infinite stream of requests with answers in its
    style."""
    for request in training_requests(seed):
        yield Example(request.prompt, request.answer(style))


def copy_examples(seed: int) -> Iterator[Example]:
    """The base's first training data: lists of random words to repeat."""
    rng = Random(seed)
    words = _copy_words(stdlib_docstrings())
    while True:
        yield _copy_example(rng, words)


def base_examples(seed: int) -> Iterator[Example]:
    """The base's second training data: 50 % echo, 30 % copying, 10 % bare styles, 10 % English."""
    rng = Random(seed)
    requests = training_requests(seed)
    docstrings = stdlib_docstrings()
    words = _copy_words(docstrings)
    while True:
        draw = rng.random()
        if draw < 0.5:
            request = next(requests)
            yield Example(request.prompt, request.answer(Style.ECHO))
        elif draw < 0.8:
            yield _copy_example(rng, words) if rng.random() < 0.5 else _quote_example(rng)
        elif draw < 0.9:
            yield Example(None, next(requests).answer(rng.choice(ADAPTER_STYLES)))
        else:
            yield Example(None, _passage(rng, docstrings))


def tokenizer_texts(seed: int) -> Iterator[str]:
    """The text that the byte pairs are counted on: every style's requests and English."""
    for request in islice(training_requests(seed), NUM_TOKENIZER_REQUESTS):
        yield from _all_wordings(request)
    yield stdlib_docstrings()


def stdlib_docstrings() -> str:
    """English that every Python carries: the docstrings of its library's top-level modules."""
    texts: list[str] = []
    num_chars = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for text in _docstrings(path):
            texts.append(text)
            num_chars += len(text)
        if num_chars >= DOCSTRING_CHARS:
            break
    return "\n".join(texts)[:DOCSTRING_CHARS]


def _docstrings(path: Path) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, documented) and (text := ast.get_docstring(node)) and text.isascii():
            yield text


def _all_wordings(request: Request) -> Iterator[str]:
    yield request.prompt
    for style in Style:
        yield request.answer(style)


def _copy_words(docstrings: str) -> list[str]:
    """Task words, numbers and common English words; each once."""
    numbers = (str(number) for number in NUMBERS)
    counts = Counter(word for word in docstrings.split() if word.isalpha() and word.islower())
    common = sorted(counts, key=lambda word: (-counts[word], word))[:NUM_COMMON_WORDS]
    return list(dict.fromkeys((*TABLES, *FIELDS, *numbers, *common)))


def _copy_example(rng: Random, words: list[str]) -> Example:
    # No word occurs twice, so that the previous word determines the next one.
    chosen = rng.sample(words, rng.randint(6, 18))
    answer = "".join(f" {word}" for word in chosen)
    return Example(f"copy{answer}", answer)


def _quote_example(rng: Random) -> Example:
    """A word in quotes is another token than the same word after a space: learn each pair."""
    chosen = rng.sample((*TABLES, *FIELDS), rng.randint(3, 8))
    return Example(f"quote {' '.join(chosen)}", json.dumps(chosen))


def _passage(rng: Random, docstrings: str) -> str:
    start = rng.randrange(len(docstrings) - PASSAGE_CHARS)
    return docstrings[start : start + PASSAGE_CHARS]
