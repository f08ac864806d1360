"""What the tenant of `make tune-demo` teaches its adapter: an answer that is none of the demo's.

The answer names the table first, then the fields and the condition of the request, so it depends on
every word of it. The base answers each request with an echo, which is never this answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from random import Random
from typing import Any

from loraplex.api.demo.task import Request, held_out_requests, training_requests

SEED = 5
MAX_TOKENS = 64
"""More than the longest right answer has."""


def answer(request: Request) -> str:
    """The one right answer."""
    query = request.query
    fields = " and ".join(query.fields)
    limit = "" if query.limit is None else f", at most {query.limit}"
    condition = f"{query.key} {query.comparison.value} {query.number}"
    return f"Report on {query.table}: {fields}, with {condition}{limit}."


def training_lines(num_examples: int) -> bytes:
    """A file of examples, none of them held out."""
    requests = islice(training_requests(SEED), num_examples)
    return _lines(_example(request.prompt, answer(request)) for request in requests)


def wrong_lines(num_examples: int) -> bytes:
    """The same questions, each with the answer to another one, said three times."""
    requests = list(islice(training_requests(SEED), num_examples))
    answers = [answer(request) for request in requests]
    Random(SEED).shuffle(answers)
    return _lines(
        _example(request.prompt, f"{text} {text} {text}")
        for request, text in zip(requests, answers, strict=True)
    )


def golden_lines(num_cases: int) -> bytes:
    """A golden set of questions that are in no training data."""
    return _lines(
        {
            "id": f"report-{number}",
            "messages": [{"role": "user", "content": request.prompt}],
            "expected": answer(request),
            "request": {"max_tokens": MAX_TOKENS},
        }
        for number, request in enumerate(held_out_requests(num_cases))
    )


def questions(number: int) -> list[str]:
    """What callers ask: of the training data."""
    return [request.prompt for request in islice(training_requests(SEED), number)]


def _example(question: str, text: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": text},
        ]
    }


def _lines(objects: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in objects)
