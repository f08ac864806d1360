"""A fleet on Ray on this machine: two replicas, two API servers, the demo's adapters and tenants.

    make fleet-demo          or: make fleet-demo JSON=FILE TP=2

The unmodified `openai` client asks both servers at once. Meanwhile the agent of one replica is
killed, the other replica is drained for a while, the controller is killed, and a third replica is
added and removed. After each of these it waits until every adapter and pin is on the first replica
of its order. A client asks again only after a 503 with a code. Each replica is one process, or
with TP a group of as many. Prints where each model's requests ran; exits with 1 unless

- the ledger has exactly the tokens that the clients counted,
- no answer was truncated, and none was another model's,
- no answer ended with a code but by the agent's end,
- the third replica had its adapters on the device before it was asked for them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from benchmarks.fleet_counts import Counts, Told, client_tokens, count, places
from benchmarks.fleet_events import Trouble
from openai import APIError, APIStatusError, AsyncOpenAI
from sqlalchemy import func, select

from loraplex.api.demo.recipe import BASE_NAME
from loraplex.api.demo.scenario import Pushed, push_all
from loraplex.api.demo.task import Request, Style, held_out_requests
from loraplex.api.local.installation import Installation
from loraplex.platform.database import Database
from loraplex.platform.models import UsageRecord
from support.adapter_homes import pin_one_of_each
from support.ray_fleet import RayFleet, running_ray
from support.server import ServerUnderTest

NUM_REPLICAS = 2
NUM_REQUESTS = 20
"""Prompts; every model is asked each of them in every round."""
NUM_CALLERS = 8
MAX_TOKENS = 96
RETRY_SECONDS = 0.5
PATIENCE_SECONDS = 90.0
SETTLE_SECONDS = 20.0


@dataclass(frozen=True)
class Question:
    """One prompt for one model, for a tenant."""

    tenant: str
    api_key: str
    model: str
    style: Style
    request: Request


@dataclass
class Asking:
    """Clients of both servers that ask round after round until they are told to stop."""

    servers: Sequence[ServerUnderTest]
    questions: Sequence[Question]
    told: list[Told] = field(default_factory=list)
    is_over: bool = False

    async def run(self) -> None:
        """Ask every question at least once, and until the end."""
        clients = {
            (server.url, question.api_key): AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key=question.api_key, max_retries=0, timeout=120.0
            )
            for server in self.servers
            for question in self.questions
        }
        waiting = self._rounds()

        async def ask_on(server: ServerUnderTest) -> None:
            for question in waiting:
                client = clients[server.url, question.api_key]
                self.told.append(await _ask(client, question))

        turns = cycle(self.servers)
        await asyncio.gather(*(ask_on(next(turns)) for _ in range(NUM_CALLERS)))
        for client in clients.values():
            await client.close()

    def _rounds(self) -> Iterator[Question]:
        draw, is_first = random.Random(1), True
        while is_first or not self.is_over:
            for question in draw.sample(self.questions, len(self.questions)):
                if self.is_over and not is_first:
                    return
                yield question
            is_first = False


async def _ask(client: AsyncOpenAI, question: Question) -> Told:
    """Ask until the answer is no 503 with a code."""
    ends_at, num_retries = time.monotonic() + PATIENCE_SECONDS, 0
    while True:
        try:
            return await _ask_once(client, question, num_retries)
        except APIStatusError as exc:
            may_retry = exc.status_code == 503 and exc.code and time.monotonic() < ends_at
            if not may_retry:
                return _as_told(question, code=exc.code or str(exc), num_retries=num_retries)
        num_retries += 1
        await asyncio.sleep(RETRY_SECONDS)


async def _ask_once(client: AsyncOpenAI, question: Question, num_retries: int) -> Told:
    """Raises APIStatusError if there is no answer, not even its beginning."""
    raw = await client.chat.completions.with_raw_response.create(
        model=question.model,
        messages=[{"role": "user", "content": question.request.prompt}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        logprobs=True,  # so that the client can count the tokens of each chunk
        stream=True,
        stream_options={"include_usage": True},
    )
    text, num_tokens, usage, code = "", 0, None, None
    try:
        async for chunk in raw.parse():
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                found = choice.logprobs.content if choice.logprobs else None
                num_tokens += len(found or ())
                num_tokens += choice.finish_reason == "stop"  # by a token that no chunk shows
    except APIError as exc:
        code = exc.code or str(exc)
    return _as_told(
        question,
        adapter=raw.headers.get("x-loraplex-adapter"),
        replica=raw.headers.get("x-loraplex-replica"),
        tier=raw.headers.get("x-loraplex-tier"),
        text=text,
        num_prompt_tokens=usage.prompt_tokens if usage else None,
        num_tokens=num_tokens,
        num_said_tokens=usage.completion_tokens if usage else None,
        code=code,
        num_retries=num_retries,
    )


def _as_told(
    question: Question,
    *,
    code: str | None,
    num_retries: int,
    adapter: str | None = None,
    replica: str | None = None,
    tier: str | None = None,
    text: str = "",
    num_prompt_tokens: int | None = None,
    num_tokens: int = 0,
    num_said_tokens: int | None = None,
) -> Told:
    return Told(
        tenant=question.tenant,
        model=question.model,
        adapter=adapter,
        style=question.style,
        request=question.request,
        replica=replica,
        tier=tier,
        text=text,
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=num_tokens,
        num_said_tokens=num_said_tokens,
        code=code,
        num_retries=num_retries,
    )


def _questions(pushed: Pushed) -> list[Question]:
    """Every model of every tenant is asked every prompt."""
    adapters = (*pushed.adapters, *pushed.namesakes)
    tenants = {each.tenant.slug: each.tenant for each in adapters}
    models = [
        *((tenant, BASE_NAME, Style.ECHO) for tenant in tenants.values()),
        *((each.tenant, each.name, each.style) for each in adapters),
    ]
    return [
        Question(tenant.slug, tenant.api_key, model, style, request)
        for request in held_out_requests(NUM_REQUESTS)
        for tenant, model, style in models
    ]


async def _ask_through_trouble(asking: Asking, trouble: Trouble) -> None:
    """The clients ask half of their questions, and then on while the fleet has trouble."""
    clients = asyncio.create_task(asking.run())
    try:
        while len(asking.told) < len(asking.questions) // 2:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(trouble.make)
    finally:
        asking.is_over = True
        await clients


def _settled_ledger_tokens(fleet: RayFleet, expected: int) -> int:
    """What the ledger has, once it is as expected, or does not become so in SETTLE_SECONDS."""
    database = Database(fleet.environment["LORAPLEX_DATABASE"])
    columns = func.sum(UsageRecord.prompt_tokens + UsageRecord.completion_tokens)
    ends_at = time.monotonic() + SETTLE_SECONDS
    while True:
        with database.platform_transaction(read_only=True) as session:
            found = int(session.scalar(select(columns)) or 0)
        if found == expected or time.monotonic() > ends_at:
            database.close()
            return found
        time.sleep(0.2)


def run(num_ranks: int) -> tuple[Counts, list[Told]]:
    """Start the fleet, ask, make trouble, and count. `num_ranks`: processes of each replica."""
    with ExitStack() as stack:
        fleet = stack.enter_context(running_ray(num_ranks=num_ranks))
        # The commands of `Installation` work on the servers' data.
        os.environ.update(fleet.environment)
        _say(f"Ray runs at {fleet.address}; starting {NUM_REPLICAS} replicas")
        ended = fleet.up(NUM_REPLICAS)
        assert ended.returncode == 0, ended.stderr[-2000:] + fleet.logs()[-4000:]
        servers = [stack.enter_context(fleet.serving(name)) for name in ("one", "two")]
        fleet.wait_ready(NUM_REPLICAS)
        _say("API servers at " + " and ".join(server.url for server in servers))
        first = servers[0]
        installation = Installation(data_dir=first.settings.data_dir, url=first.url, show=_say)
        pushed = push_all(installation.with_operator())
        asking = Asking(servers, _questions(pushed))
        tenants = {each.tenant.slug: each.tenant.api_key for each in pushed.adapters}
        homes = list(pin_one_of_each(first, tenants).values())
        trouble = Trouble(fleet, homes, asking.told, _say)
        asyncio.run(_ask_through_trouble(asking, trouble))
        counts = count(
            asking.told,
            replicas=list(fleet.rows()),
            ledger_tokens=_settled_ledger_tokens(fleet, client_tokens(asking.told)),
            events=trouble.events,
            moved=trouble.moved,
        )
        return counts, asking.told


def _show(counts: Counts, told: Sequence[Told]) -> None:
    print("\nWhere each model's requests ran:")
    for model, where in sorted(places(told).items()):
        shown = "  ".join(f"{replica}: {number}" for replica, number in sorted(where.items()))
        print(f"  {model:20s} {shown}")
    print(json.dumps(counts.as_json(), indent=2))
    print("The ledger has what the clients counted." if counts.is_good else "NOT AS IT SHALL BE.")


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the counts to this file too")
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, help="processes of each replica"
    )
    options = parser.parse_args()
    target: Path | None = options.json
    counts, told = run(options.tensor_parallel_size)
    _show(counts, told)
    if target is not None:
        target.write_text(json.dumps(counts.as_json(), indent=2) + "\n")
    return 0 if counts.is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
