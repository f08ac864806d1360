"""A moderate mixed load, like that of a small server."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx
from benchmarks.shared_tenant import AdapterFiles, Tenant

ANSWERED, ABORTED, REFUSED = "answered", "aborted", "refused"
TENANT_PATHS = (
    *("/v1/me", "/v1/overview", "/v1/adapters", "/v1/models", "/v1/usage", "/v1/quota"),
    *("/v1/requests", "/v1/requests/live", "/v1/audit", "/v1/memory", "/v1/base", "/v1/uploads"),
)
OPERATOR_PATHS = (
    *("/admin/overview", "/admin/adapters", "/admin/requests", "/admin/requests/live"),
    *("/admin/usage", "/admin/servers", "/admin/tenants", "/admin/memory", "/admin/residency"),
    *("/admin/settings", "/admin/audit", "/admin/readiness", "/admin/operators"),
)
OPEN_PATHS = ("/console/", "/openapi.json", "/health", "/ready")
GRAMMARS: Sequence[Mapping[str, Any]] = (
    {"choice": ["yes", "no.", "per haps"]},
    {"regex": "[a-c]{3}-[0-9]+!"},
    {"grammar": 'start: "x" ("yz")~2 "."'},
)
LONG_TOKENS = 48
NUM_TEXTS = 500
"""So many different things are said. The tokenizer remembers 10,000 pieces of text; for the tiny
model a text is one piece, so ever new texts would fill that memory for as long as is measured."""


@dataclass(frozen=True)
class Customer:
    """A tenant, and what it has."""

    url: str
    key: str
    adapters: Sequence[str]


class Surprise(Exception):
    """An answer that is not what its kind of request has to have."""


@dataclass(frozen=True)
class Habit:
    """Something that is done again and again."""

    name: str
    every_seconds: float
    """The mean pause between two."""
    act: Callable[[random.Random], Awaitable[str]]
    """Returns what came of it."""
    outcome: str
    """What must come of it."""


class QuietLoad:
    """All habits, each at its own pace."""

    def __init__(
        self,
        customers: Sequence[Customer],
        *,
        base: str,
        operator_key: str,
        files: AdapterFiles,
        seed: int,
        pace: float,
    ) -> None:
        """`pace`: by how much everything happens more often than it is written down here; it may be
        changed."""
        self.outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """How often what came of each habit."""
        self.surprises: list[str] = []
        """What should not have come of it."""
        self._customers = customers
        self._base = base
        self._files = files
        self._seed = seed
        self.pace = pace
        self._numbers = count()
        texts = random.Random(seed)
        self._texts = [_new_text(texts) for _ in range(NUM_TEXTS)]
        url = customers[0].url
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=120.0, limits=limits)
        self._operator = {"authorization": f"Bearer {operator_key}"}
        self._pushers = {
            customer.key: Tenant(customer.url, customer.key, base) for customer in customers
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Until the block is left; what runs then is waited for."""
        is_over = asyncio.Event()
        tasks = [asyncio.create_task(self._follow(habit, is_over)) for habit in self._habits()]
        try:
            yield
        finally:
            is_over.set()
            await asyncio.gather(*tasks)
            await self._http.aclose()
            for pusher in self._pushers.values():
                await pusher.aclose()

    @property
    def num_done(self) -> int:
        """Of all habits, whatever came of it."""
        return sum(sum(counts.values()) for counts in self.outcomes.values())

    async def fill(self, num_schemas: int) -> None:
        """Send so many new schemas, one after another: what servers keep of them is full then."""
        draw = random.Random(self._seed)
        for _ in range(num_schemas):
            outcome = await self._follow_new_schema(draw)
            assert outcome == ANSWERED, outcome

    def _habits(self) -> list[Habit]:
        return [
            Habit("chat with the base", 1.0, self._chat_with_base, ANSWERED),
            Habit("chat with an adapter", 0.6, self._chat_with_adapter, ANSWERED),
            Habit("stream of an adapter", 0.5, self._stream_of_adapter, ANSWERED),
            Habit("long streams", 2.0, self._long_streams, ANSWERED),
            Habit("aborted stream", 2.0, self._abort, ABORTED),
            Habit("known schema", 3.0, self._follow_known_schema, ANSWERED),
            Habit("new schema", 30.0, self._follow_new_schema, ANSWERED),
            Habit("grammar", 5.0, self._follow_grammar, ANSWERED),
            Habit("response", 5.0, self._respond, ANSWERED),
            Habit("embedding", 10.0, self._embed, ANSWERED),
            Habit("tokenize", 5.0, self._tokenize, ANSWERED),
            Habit("push and delete", 15.0, self._push_and_delete, ANSWERED),
            Habit("read as a tenant", 2.0, self._read_as_tenant, ANSWERED),
            Habit("read as an operator", 2.0, self._read_as_operator, ANSWERED),
            Habit("read without a key", 4.0, self._read_openly, ANSWERED),
            Habit("metrics", 5.0, self._scrape, ANSWERED),
            Habit("wrong key", 3.0, self._use_wrong_key, REFUSED),
            Habit("unknown model", 5.0, self._ask_for_unknown_model, REFUSED),
            Habit("wrong parameter", 5.0, self._send_wrong_parameter, REFUSED),
            Habit("too long a prompt", 10.0, self._send_too_long_prompt, REFUSED),
            Habit("no JSON", 10.0, self._send_no_json, REFUSED),
            Habit("wrong schema", 30.0, self._send_wrong_schema, REFUSED),
            Habit("unknown path", 10.0, self._ask_for_unknown_path, REFUSED),
        ]

    async def _follow(self, habit: Habit, is_over: asyncio.Event) -> None:
        draw = random.Random(f"{self._seed}/{habit.name}")
        while not is_over.is_set():
            try:
                outcome = await habit.act(draw)
            except (httpx.TransportError, Surprise) as exc:
                outcome = repr(exc)
            self.outcomes[habit.name][outcome] += 1
            if outcome != habit.outcome:
                self.surprises.append(f"{habit.name}: {outcome}")
            pause = draw.expovariate(self.pace / habit.every_seconds)
            try:
                async with asyncio.timeout(pause):
                    await is_over.wait()
            except TimeoutError:
                pass

    # Requests that are answered

    async def _chat_with_base(self, draw: random.Random) -> str:
        return await self._ask(draw, self._chat(draw, self._base))

    async def _chat_with_adapter(self, draw: random.Random) -> str:
        customer = draw.choice(self._customers)
        return await self._ask(draw, self._chat(draw, _some_adapter(draw, customer)), customer)

    async def _stream_of_adapter(self, draw: random.Random) -> str:
        customer = draw.choice(self._customers)
        return await self._stream(self._chat(draw, _some_adapter(draw, customer)), customer)

    async def _long_streams(self, draw: random.Random) -> str:
        """Two at once, of adapters that few ask for."""
        customer = draw.choice(self._customers)
        names = draw.sample(customer.adapters, 2)
        bodies = [self._chat(draw, name) | {"max_tokens": 4 * LONG_TOKENS} for name in names]
        outcomes = await asyncio.gather(*(self._stream(body, customer) for body in bodies))
        return ANSWERED if set(outcomes) == {ANSWERED} else " and ".join(outcomes)

    async def _abort(self, draw: random.Random) -> str:
        customer = draw.choice(self._customers)
        body = self._chat(draw, _some_adapter(draw, customer)) | {"max_tokens": 4 * LONG_TOKENS}
        return await self._stream(body, customer, num_events=draw.randrange(1, 10))

    async def _follow_known_schema(self, draw: random.Random) -> str:
        return await self._follow_schema(draw, f"color_{draw.randrange(20)}")

    async def _follow_new_schema(self, draw: random.Random) -> str:
        return await self._follow_schema(draw, f"field_{next(self._numbers)}")

    async def _follow_schema(self, draw: random.Random, name: str) -> str:
        schema = {
            "type": "object",
            "properties": {name: {"enum": ["red", "blue"]}},
            "required": [name],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
        body = self._chat(draw, self._base) | {"max_tokens": 100, "response_format": form}
        del body["ignore_eos"]
        return await self._ask(draw, body)

    async def _follow_grammar(self, draw: random.Random) -> str:
        body = self._chat(draw, self._base)
        body |= {"max_tokens": 100, "structured_outputs": draw.choice(GRAMMARS)}
        del body["ignore_eos"]
        return await self._ask(draw, body)

    async def _respond(self, draw: random.Random) -> str:
        body = {"model": self._base, "input": self._text(draw), "max_output_tokens": LONG_TOKENS}
        return await self._post("/v1/responses", body, draw.choice(self._customers))

    async def _embed(self, draw: random.Random) -> str:
        body = {"model": self._base, "input": [self._text(draw), self._text(draw)]}
        return await self._post("/v1/embeddings", body, draw.choice(self._customers))

    async def _tokenize(self, draw: random.Random) -> str:
        body = {"model": self._base, "prompt": self._text(draw)}
        return await self._post("/tokenize", body, draw.choice(self._customers))

    async def _push_and_delete(self, draw: random.Random) -> str:
        """A new adapter, asked once and deleted: there are as many as before."""
        customer = draw.choice(self._customers)
        name = f"fresh-{next(self._numbers)}"
        pusher = self._pushers[customer.key]
        state = await pusher.push(name, self._files.config, self._files.make())
        if state != "ready":
            return state
        answered = await self._ask(draw, self._chat(draw, name), customer)
        headers = _headers(customer)
        deleted = await self._http.delete(f"/v1/adapters/{name}", headers=headers)
        return answered if deleted.is_success else _code(deleted)

    async def _read_as_tenant(self, draw: random.Random) -> str:
        headers = _headers(draw.choice(self._customers))
        return _outcome(await self._http.get(draw.choice(TENANT_PATHS), headers=headers))

    async def _read_as_operator(self, draw: random.Random) -> str:
        return _outcome(await self._http.get(draw.choice(OPERATOR_PATHS), headers=self._operator))

    async def _read_openly(self, draw: random.Random) -> str:
        return _outcome(await self._http.get(draw.choice(OPEN_PATHS)))

    async def _scrape(self, draw: random.Random) -> str:
        return _outcome(await self._http.get("/metrics"))

    # Requests that are refused

    async def _use_wrong_key(self, draw: random.Random) -> str:
        headers = {"authorization": f"Bearer {draw.randbytes(24).hex()}"}
        return _outcome(await self._http.get("/v1/models", headers=headers))

    async def _ask_for_unknown_model(self, draw: random.Random) -> str:
        return await self._ask(draw, self._chat(draw, f"nobody-{next(self._numbers)}"))

    async def _send_wrong_parameter(self, draw: random.Random) -> str:
        return await self._ask(draw, self._chat(draw, self._base) | {"temperature": -1})

    async def _send_too_long_prompt(self, draw: random.Random) -> str:
        body = {"model": self._base, "prompt": "x" * 20_000, "max_tokens": 1}
        return await self._post("/v1/completions", body, draw.choice(self._customers))

    async def _send_no_json(self, draw: random.Random) -> str:
        headers = _headers(draw.choice(self._customers)) | {"content-type": "application/json"}
        path = "/v1/chat/completions"
        return _outcome(await self._http.post(path, content=draw.randbytes(100), headers=headers))

    async def _send_wrong_schema(self, draw: random.Random) -> str:
        schema = {"type": f"nothing-{next(self._numbers)}"}
        form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
        return await self._ask(draw, self._chat(draw, self._base) | {"response_format": form})

    async def _ask_for_unknown_path(self, draw: random.Random) -> str:
        headers = _headers(draw.choice(self._customers))
        return _outcome(await self._http.get(f"/v1/nothing-{next(self._numbers)}", headers=headers))

    # How they are sent

    def _text(self, draw: random.Random) -> str:
        return draw.choice(self._texts)

    def _chat(self, draw: random.Random, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "messages": [{"role": "user", "content": self._text(draw)}],
            "max_tokens": draw.randrange(4, LONG_TOKENS),
            "ignore_eos": True,
        }

    async def _ask(
        self, draw: random.Random, body: dict[str, Any], customer: Customer | None = None
    ) -> str:
        customer = customer or draw.choice(self._customers)
        return await self._post("/v1/chat/completions", body, customer)

    async def _post(self, path: str, body: dict[str, Any], customer: Customer) -> str:
        answer = await self._http.post(path, json=body, headers=_headers(customer))
        if answer.is_success and body.get("ignore_eos"):
            _check_usage(body, answer.json()["usage"])
        return _outcome(answer)

    async def _stream(
        self, body: dict[str, Any], customer: Customer, num_events: int | None = None
    ) -> str:
        """`num_events`: after so many the caller goes away."""
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        events: list[str] = []
        async with self._http.stream(
            "POST", "/v1/chat/completions", json=body, headers=_headers(customer)
        ) as answer:
            if not answer.is_success:
                await answer.aread()
                return _outcome(answer)
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
                if len(events) == num_events:
                    return ABORTED
        if not events or events[-1] != "[DONE]":
            raise Surprise(f"a stream ended with {events[-1:]}")
        _check_usage(body, json.loads(events[-2])["usage"])
        return ANSWERED


def _some_adapter(draw: random.Random, customer: Customer) -> str:
    """The first are asked for often, the last seldom: those are cold when their turn comes."""
    weights = [1 / (number + 1) for number in range(len(customer.adapters))]
    return draw.choices(customer.adapters, weights)[0]


def _new_text(draw: random.Random) -> str:
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=draw.randrange(1, 200)))


def _headers(customer: Customer) -> dict[str, str]:
    return {"authorization": f"Bearer {customer.key}"}


def _check_usage(body: Mapping[str, Any], usage: Mapping[str, int]) -> None:
    if usage["completion_tokens"] != body["max_tokens"]:
        raise Surprise(f"{usage['completion_tokens']} of {body['max_tokens']} tokens")


def _outcome(answer: httpx.Response) -> str:
    """A refusal is one by the caller's own mistake, with a code."""
    if answer.is_success:
        return ANSWERED
    code = _code(answer)
    is_own_mistake = answer.status_code in (400, 401, 404, 422)
    return REFUSED if is_own_mistake and code else f"{answer.status_code} {code}"


def _code(answer: httpx.Response) -> str:
    return str(answer.json().get("error", {}).get("code", ""))
