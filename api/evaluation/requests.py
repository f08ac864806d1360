"""The requests of an evaluation, as lines of batches, and what their answers say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from .golden_set import GoldenCase, GoldenSet

MAX_TOKENS = 512
"""Of an answer, unless the case says otherwise."""


class Line(msgspec.Struct, frozen=True):
    """A line of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


def answer_lines(golden_set: GoldenSet, models: Sequence[str]) -> list[Line]:
    """Ask each model for an answer to each case, case by case, so that each step of the engine
    mixes the models. Answers are greedy unless the case says otherwise."""
    return [
        Line(f"{at}-{number}", _url(case), _body(case, model))
        for at, case in enumerate(golden_set.cases)
        for number, model in enumerate(models)
    ]


def text_of(body: Mapping[str, Any]) -> str:
    """The text of a completion's or chat completion's only choice; empty if it has none."""
    choice = body["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text or ""


def encoded(lines: Sequence[Line]) -> bytes:
    """The input file of a batch."""
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def bodies_of(answers: Path, lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The bodies of the answers in the output file of a batch, in the order of its lines."""
    results = map(msgspec.json.decode, answers.read_bytes().splitlines())
    bodies = {result["custom_id"]: result["response"]["body"] for result in results}
    return [bodies[line.custom_id] for line in lines]


def embedding_lines(texts: Sequence[str], base: str) -> list[Line]:
    """Ask for the base's embedding of each text."""
    return [
        Line(str(at), "/v1/embeddings", {"model": base, "input": text})
        for at, text in enumerate(texts)
    ]


def vector_of(body: Mapping[str, Any]) -> list[float]:
    """The embedding in an answer."""
    vector: list[float] = body["data"][0]["embedding"]
    return vector


def _url(case: GoldenCase) -> str:
    return "/v1/completions" if case.messages is None else "/v1/chat/completions"


def _body(case: GoldenCase, model: str) -> dict[str, Any]:
    prompt = {"prompt": case.prompt} if case.messages is None else {"messages": case.messages}
    return {"max_tokens": MAX_TOKENS, "temperature": 0, **case.request, "model": model, **prompt}
