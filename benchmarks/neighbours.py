"""Tenants that ask their adapters while another tenant's job trains, and how long they wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import count, pairwise
from random import Random

from openai import AsyncOpenAI

from loraplex.api.demo.scenario import Pushed, PushedAdapter
from loraplex.api.demo.task import Request, held_out_requests

MAX_TOKENS = 96
LONGEST_PAUSE_SECONDS = 0.4
"""Between two questions of one neighbour; on average half of it."""


class Neighbours:
    """One stream of questions for each adapter that was pushed. Never idle for a second together,
    so the trainer has the engine to itself in its turns only."""

    def __init__(self, url: str, pushed: Pushed) -> None:
        self._url = url
        self._adapters = [*pushed.adapters, *pushed.namesakes]
        self._requests = held_out_requests()
        self._phases = count()

    def ask(self, seconds: float) -> list[float]:
        """Ask for this long; returns the seconds between two tokens of an answer, of all answers.
        Raises OpenAIError."""
        return asyncio.run(self._ask_all(seconds, next(self._phases)))

    async def _ask_all(self, seconds: float, phase: int) -> list[float]:
        ends_at = time.perf_counter() + seconds
        streams = (
            self._stream(adapter, Random(phase * len(self._adapters) + number), ends_at)
            for number, adapter in enumerate(self._adapters)
        )
        return [gap for gaps in await asyncio.gather(*streams) for gap in gaps]

    async def _stream(self, adapter: PushedAdapter, draw: Random, ends_at: float) -> list[float]:
        gaps: list[float] = []
        async with AsyncOpenAI(
            base_url=f"{self._url}/v1", api_key=adapter.tenant.api_key
        ) as client:
            while time.perf_counter() < ends_at:
                gaps += await _gaps(client, adapter.name, draw.choice(self._requests))
                await asyncio.sleep(draw.uniform(0, LONGEST_PAUSE_SECONDS))
        return gaps


async def _gaps(client: AsyncOpenAI, model: str, request: Request) -> Sequence[float]:
    chunks = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": request.prompt}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
    )
    times = [
        time.perf_counter()
        async for chunk in chunks
        if chunk.choices and chunk.choices[0].delta.content
    ]
    return [later - earlier for earlier, later in pairwise(times)]
