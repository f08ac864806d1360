"""The loud tenant, which fills every queue, as a separate process.

    python -m benchmarks.loud_tenant DIRECTORY

plan.json in the directory describes its requests. A line on its standard input starts it, the next
one stops it. It prints a line when it has started, and one when all its requests have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared_tenant import AdapterFiles, Tenant

PAUSE_SECONDS = 0.5
"""Between a refused prompt and the next."""
CONNECTIONS_PER_POOL = 25
"""At every request and answer the client walks over all connections of its pool: with 800 in one
that took a fifth of a core, which the server needs."""


class Loud:
    def __init__(
        self, make_tenant: Callable[[], Tenant], files: AdapterFiles, cold: Sequence[str]
    ) -> None:
        self._tenant = make_tenant()
        self._pools = [make_tenant() for _ in range(-(-len(cold) // CONNECTIONS_PER_POOL))]
        self._files = files
        self._cold = cold
        self._number = 0
        self._is_over = False

    @contextlib.asynccontextmanager
    async def at_work(
        self, *, commits: int, prompts: int, prompt_bytes: int, fill_seconds: float
    ) -> AsyncIterator[None]:
        """Within the block it asks, for `fill_seconds` already; after it all that it asked for has
        ended."""
        self._is_over = False
        prompt = "a b " * (prompt_bytes // 4)
        tasks = [
            asyncio.create_task(self._ask_cold()),
            *(asyncio.create_task(self._push()) for _ in range(commits)),
            *(asyncio.create_task(self._ask_long(prompt)) for _ in range(prompts)),
        ]
        await asyncio.sleep(fill_seconds)
        try:
            yield
        finally:
            self._is_over = True
            await asyncio.gather(*tasks)

    @property
    def answers(self) -> Counter[str]:
        """How many of each outcome: a state, or a status and a code."""
        return sum((each.answers for each in (self._tenant, *self._pools)), Counter())

    async def aclose(self) -> None:
        for each in (self._tenant, *self._pools):
            await each.aclose()

    async def _push(self) -> None:
        while not self._is_over:
            self._number += 1
            name = f"large-{os.getpid()}-{self._number}"
            await self._tenant.push(name, self._files.config, self._files.make())

    async def _ask_cold(self) -> None:
        while not self._is_over:
            asks = zip(itertools.cycle(self._pools), self._cold)
            await asyncio.gather(*(pool.ask(name, "x") for pool, name in asks))

    async def _ask_long(self, prompt: str) -> None:
        while not self._is_over:
            await self._tenant.ask_base(prompt, 1)
            await asyncio.sleep(PAUSE_SECONDS)


async def run(plan: dict[str, Any], files: AdapterFiles) -> None:
    loud = Loud(lambda: Tenant(plan["url"], plan["key"], plan["base"]), files, plan["cold"])
    while await asyncio.to_thread(sys.stdin.readline):
        async with loud.at_work(**plan["load"]):
            print("begun", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
        print(json.dumps(loud.answers), flush=True)
    await loud.aclose()


def main() -> None:
    directory = Path(sys.argv[1])
    plan = json.loads((directory / "plan.json").read_text())
    asyncio.run(run(plan, AdapterFiles(directory / "large")))


if __name__ == "__main__":
    main()
