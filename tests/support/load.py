"""A load of requests that checks how each of them ends."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

MAX_TOKENS = 40
PAUSE_SECONDS = 0.05
"""After a refusal, before the next request."""


@dataclass
class Load:
    """Workers that ask one request after another, every other one as a stream.

    A request ends well if the answer is whole or the error has a code. Anything else is a
    violation: a stream that just stops, a success with tokens missing, a broken connection.
    """

    url: str
    key: str
    models: Sequence[str]
    max_tokens: int = MAX_TOKENS
    num_answered: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    may_refuse_connections: bool = False
    """The server has been told to stop: it need not listen any more."""

    @asynccontextmanager
    async def running(self, num_workers: int) -> AsyncIterator[None]:
        """Keep the load up until the block is left; what runs then is waited for."""
        is_over = asyncio.Event()
        headers = {"authorization": f"Bearer {self.key}"}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=120.0, limits=limits
        ) as client:
            workers = [
                asyncio.create_task(self._work(client, worker, is_over))
                for worker in range(num_workers)
            ]
            try:
                yield
            finally:
                is_over.set()
                await asyncio.gather(*workers)

    async def until_answered(self, num_more: int) -> None:
        """Wait for so many more whole answers."""
        target = self.num_answered + num_more
        while self.num_answered < target:
            await asyncio.sleep(0.01)

    async def _work(self, client: httpx.AsyncClient, worker: int, is_over: asyncio.Event) -> None:
        draw = random.Random(worker)
        while not is_over.is_set():
            body = {
                "model": draw.choice(self.models),
                "prompt": [draw.randrange(200) for _ in range(draw.randrange(1, 60))],
                "max_tokens": self.max_tokens,
                "ignore_eos": True,
            }
            num_before = self.num_answered
            with suppress(asyncio.CancelledError):
                await self._ask(client, body, is_stream=draw.random() < 0.5)
            if self.num_answered == num_before:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _ask(
        self, client: httpx.AsyncClient, body: dict[str, Any], *, is_stream: bool
    ) -> None:
        may_be_refused = self.may_refuse_connections
        try:
            if is_stream:
                await self._ask_for_stream(client, body)
            else:
                answer = await client.post("/v1/completions", json=body)
                self._judge(answer.status_code, answer.json())
        except httpx.TransportError as exc:
            if not may_be_refused:
                self.violations.append(repr(exc))
        except ValueError as exc:
            self.violations.append(repr(exc))

    async def _ask_for_stream(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        events: list[str] = []
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                self._judge(answer.status_code, json.loads(await answer.aread()))
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
        if events and events[-1] == "[DONE]":
            self._judge(200, json.loads(events[-2]))
            return
        last = json.loads(events[-1]) if events else {}
        self._judge(503 if "error" in last else 200, last)

    def _judge(self, status: int, body: dict[str, Any]) -> None:
        if status == 200:
            usage = body.get("usage") or {}
            if usage.get("completion_tokens") == self.max_tokens:
                self.num_answered += 1
            else:
                self.violations.append(f"not whole: {body}")
        elif code := body.get("error", {}).get("code"):
            self.codes[code] += 1
        else:
            self.violations.append(f"without a code: {status} {body}")
