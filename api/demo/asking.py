"""Queries all served models concurrently with the unmodified `openai` client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import AsyncOpenAI

MAX_CONCURRENT = 32
MAX_TOKENS = 128
"""More than the longest right answer has."""
TIMEOUT_SECONDS = 60.0


class AskingFailed(Exception):
    """A question was answered with an error, or not at all."""


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt for one model, for a tenant."""

    api_key: str
    model: str
    prompt: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, and what its headers report about the adapter; the base's response has none."""

    text: str
    version: str
    """The pinned form of the model that answered."""
    output_tokens: int
    tier: str | None
    """The adapter's tier when the request arrived."""
    wait_ms: int | None
    """How long the request waited for the weights."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Every question's answer, in the questions' order."""

    answers: list[Answer]
    wall_seconds: float

    @property
    def output_tokens_per_second(self) -> float:
        return sum(answer.output_tokens for answer in self.answers) / self.wall_seconds


async def ask_all(
    questions: Sequence[Question],
    *,
    base_url: str,
    on_answer: Callable[[], None] = lambda: None,
) -> Answers:
    """Ask greedily, `MAX_CONCURRENT` at a time; `base_url` ends in `/v1`.

    Raises `AskingFailed` for the first question that fails.
    """
    from openai import AsyncOpenAI

    clients = {
        key: AsyncOpenAI(base_url=base_url, api_key=key, timeout=TIMEOUT_SECONDS)
        for key in {question.api_key for question in questions}
    }
    turns = asyncio.Semaphore(MAX_CONCURRENT)

    async def ask(question: Question) -> Answer:
        async with turns:
            answer = await _ask(clients[question.api_key], question)
        on_answer()
        return answer

    started = perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(question)) for question in questions]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    wall_seconds = perf_counter() - started
    for client in clients.values():
        await client.close()
    return Answers([task.result() for task in tasks], wall_seconds)


async def _ask(client: AsyncOpenAI, question: Question) -> Answer:
    from openai import OpenAIError

    try:
        raw = await client.chat.completions.with_raw_response.create(
            model=question.model,
            messages=[{"role": "user", "content": question.prompt}],
            temperature=0,
            max_tokens=MAX_TOKENS,
        )
    except OpenAIError as exc:
        raise AskingFailed(f"{question.model}: {exc}") from exc
    completion = raw.parse()
    wait_ms = raw.headers.get("x-loraplex-wait-ms")
    return Answer(
        text=completion.choices[0].message.content or "",
        version=completion.model,
        output_tokens=completion.usage.completion_tokens if completion.usage else 0,
        tier=raw.headers.get("x-loraplex-tier"),
        wait_ms=None if wait_ms is None else int(wait_ms),
    )
