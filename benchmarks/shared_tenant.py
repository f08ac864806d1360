"""The requests of the tenants in `bench_shared_queues`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from loraplex.api.client.polling import pauses

WEIGHTS = "adapter_model.safetensors"
REQUEST_SECONDS = 300.0


class AdapterFiles:
    """Adapters with one configuration, each with content of its own."""

    def __init__(self, folder: Path) -> None:
        """`folder`: an adapter in bfloat16."""
        self.config = folder / "adapter_config.json"
        self._weights = (folder / WEIGHTS).read_bytes()
        self._number = 0

    def make(self) -> bytes:
        """The weights of the next one: its number stands in the signs of the last 32 values."""
        self._number += 1
        signs = (0x3C | 0x80 * (self._number >> bit & 1) for bit in range(32))
        tail = b"".join(bytes((0, sign)) for sign in signs)
        return self._weights[: -len(tail)] + tail


class Tenant:
    """One tenant's requests."""

    def __init__(
        self,
        url: str,
        key: str,
        base: str,
        *,
        poll_pauses: Callable[[], Iterator[float]] = pauses,
    ) -> None:
        """`poll_pauses()`: seconds until it asks again what became of a push; those of the CLI."""
        self.answers: Counter[str] = Counter()
        """How many of each outcome: a state, or a status and a code."""
        self._base = base
        self._poll_pauses = poll_pauses
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {key}"},
            timeout=REQUEST_SECONDS,
            limits=httpx.Limits(max_connections=None),
        )

    async def push(self, name: str, config: Path, weights: bytes) -> str:
        """Until the version is ready; what came of it."""
        declared = {
            "config": json.loads(config.read_text()),
            "size_bytes": len(weights),
            "sha256": hashlib.sha256(weights).hexdigest(),
        }
        opened = await self._http.post(f"/v1/adapters/{name}/uploads", json=declared)
        if opened.status_code != 201:
            return self._note(opened)
        path = f"/v1/uploads/{opened.json()['id']}"
        sent = await self._http.put(
            f"{path}/content",
            params={"offset": 0},
            content=weights,
            headers={"content-type": "application/octet-stream"},
        )
        if sent.status_code != 200:
            return self._note(sent)
        committed = await self._http.post(f"{path}/commit")
        if committed.status_code != 200:
            return self._note(committed)
        state = await self._settled(name, committed.json()["version"])
        self.answers[state] += 1
        return state

    async def ask(self, model: str, prompt: str, max_tokens: int = 1) -> list[float]:
        """When each chunk of the answer came, in seconds from the request; empty if refused."""
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
        }
        begun_at = time.perf_counter()
        times = []
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                self._note(answer)
                return []
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter() - begun_at)
        self.answers["answered"] += 1
        return times

    async def ask_base(self, prompt: str, max_tokens: int) -> list[float]:
        return await self.ask(self._base, prompt, max_tokens)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _settled(self, name: str, version: int) -> str:
        for pause in self._poll_pauses():
            answer = await self._http.get(f"/v1/adapters/{name}/versions/{version}")
            if (state := str(answer.json()["state"])) in ("ready", "rejected"):
                return state
            await asyncio.sleep(pause)
        raise AssertionError("the pauses have no end")

    def _note(self, answer: httpx.Response) -> str:
        outcome = f"{answer.status_code} {answer.json()['error']['code']}"
        self.answers[outcome] += 1
        return outcome
