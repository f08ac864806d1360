"""64 concurrent callers on two servers with one database: each limit is exact to one request."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from loraplex.api.settings import Settings
from loraplex.platform.budgets import service as budgets
from loraplex.platform.database import Database
from loraplex.platform.quotas import service as quotas
from loraplex.platform.quotas.holder import TENANT, key_holder, user_holder
from loraplex.platform.quotas.models import Period, PeriodUse, Reservation
from loraplex.platform.usage.models import UsageRecord
from support.databases import copy_of_migrated_sqlite, migrate, new_postgres_url
from support.limits import limit
from support.money import UNIT, set_budget, set_price
from support.server import FAKE_ENGINE, Caller, ServerUnderTest, serving
from support.waiting import wait_for

NUM_CALLERS = 64
SHORT = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 10, "ignore_eos": True}
LONG = {**SHORT, "n": 8, "max_tokens": 480, "speculation": "off", "stream": True}
NUM_TOKENS = 14
COST = 4 * UNIT // 10**6 + 10 * 2 * UNIT // 10**6
"""Of a short request by the prices of `support.money`, none of it cached."""


@dataclass(frozen=True)
class Pair:
    """Two servers on one database, and a tenant."""

    servers: list[ServerUnderTest]
    database: Database
    caller: Caller

    def limit(self, **limits: Any) -> None:
        limit(self.database, self.caller.tenant_id, **limits)

    @cached_property
    def clients(self) -> list[httpx.Client]:
        """One to each server."""
        headers = {"authorization": f"Bearer {self.caller.key}"}
        limits = httpx.Limits(max_connections=NUM_CALLERS)
        return [
            httpx.Client(base_url=server.url, headers=headers, limits=limits, timeout=60.0)
            for server in self.servers
        ]

    def key_of_user(self, email: str) -> tuple[str, str, str]:
        """A new user, and a key of it: the user's id, the key's id and its text."""
        http = self.caller.http
        user = http.post("/v1/users", json={"email": email, "role": "developer"}).json()["id"]
        key = http.post("/v1/keys", json={"name": "n", "scopes": ["infer"], "user": user}).json()
        return user, key["id"], key["key"]

    def ask_all(
        self, body: dict[str, Any] = SHORT, *, key: str | None = None
    ) -> list[httpx.Response]:
        """The answers to all callers, who ask at the same moment; streams are left open."""
        barrier = Barrier(NUM_CALLERS)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}

        def ask(number: int) -> httpx.Response:
            client = self.clients[number % len(self.clients)]
            request = client.build_request("POST", "/v1/completions", json=body, headers=headers)
            barrier.wait()
            return client.send(request, stream="stream" in body)

        with ThreadPoolExecutor(NUM_CALLERS) as threads:
            return list(threads.map(ask, range(NUM_CALLERS)))

    def reservations(self) -> Sequence[Reservation]:
        with self.database.transaction(self.caller.tenant_id, read_only=True) as session:
            return session.scalars(select(Reservation)).all()

    def ledger(self) -> Sequence[UsageRecord]:
        with self.database.transaction(self.caller.tenant_id, read_only=True) as session:
            return session.scalars(select(UsageRecord)).all()

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.database.close()


def start_pair(base: Path, folder: Path, url: str, stack: ExitStack) -> Pair:
    secret = secrets.token_hex(32)
    environment = {"LORAPLEX_SECRET": secret, "LORAPLEX_DATABASE": url}
    options = ("--served-model-name", "tiny")

    def start(name: str) -> ServerUnderTest:
        running = serving(base, folder / name, *options, engine=FAKE_ENGINE, **environment)
        server = stack.enter_context(running)
        settings = Settings(data_dir=folder / name, database=url, secret=secret)  # type: ignore[arg-type]
        return replace(server, settings=settings)

    with ThreadPoolExecutor(2) as threads:
        servers = list(threads.map(start, ("one", "two")))
    pair = Pair(servers, Database(url), servers[0].make_caller("acme"))
    set_price(pair.database)  # before the first request, when the servers read it
    stack.callback(pair.close)
    return pair


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def pair(
    request: pytest.FixtureRequest, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(f"pair-{request.param}")
    with ExitStack() as stack:
        if request.param == "sqlite":
            url = copy_of_migrated_sqlite(folder)
        else:
            url = stack.enter_context(new_postgres_url())
            migrate(url)
        yield start_pair(tiny_base, folder, url, stack)


def passed(answers: list[httpx.Response]) -> int:
    """How many passed; the others were all refused for a limit."""
    assert {answer.status_code for answer in answers} <= {200, 429}
    return sum(answer.is_success for answer in answers)


def timed(ask: Callable[[], list[httpx.Response]]) -> tuple[int, float]:
    began = time.monotonic()
    return passed(ask()), time.monotonic() - began


def test_requests_per_minute(pair: Pair) -> None:
    pair.limit(requests_per_minute=20)
    num_passed, seconds = timed(pair.ask_all)
    assert 20 <= num_passed <= 20 + seconds * 20 / 60


def test_output_tokens_per_minute(pair: Pair) -> None:
    pair.limit(output_tokens_per_minute=205)
    num_passed, seconds = timed(pair.ask_all)
    assert 20 <= num_passed <= (205 + seconds * 205 / 60) // 10


def test_a_budget_of_tokens(pair: Pair) -> None:
    used = tokens_of(pair.ledger())
    pair.limit(tokens_per_period=used + 21 * NUM_TOKENS + 5)
    assert passed(pair.ask_all()) == 21
    with pair.database.transaction(pair.caller.tenant_id, read_only=True) as session:
        tokens = session.scalars(select(PeriodUse.tokens)).all()
    assert tokens == [tokens_of(pair.ledger())] == [used + 21 * NUM_TOKENS]


def test_requests_at_once(pair: Pair) -> None:
    pair.limit(concurrent_requests=5)
    num_ended = -len(pair.ledger())
    answers = pair.ask_all(LONG)
    num_running, num_ended = len(pair.reservations()), num_ended + len(pair.ledger())
    for answer in answers:
        answer.close()
    assert num_running <= 5 <= passed(answers) <= 5 + num_ended
    wait_for(lambda: not pair.reservations(), seconds=20)


@pytest.mark.parametrize("kind", ["tenant", "user", "key"])
def test_a_budget_of_money(pair: Pair, kind: str) -> None:
    pair.limit()
    user_id, key_id, key = pair.key_of_user(f"{kind}@acme.example")
    holder = {"tenant": TENANT, "user": user_holder(user_id), "key": key_holder(key_id)}[kind]
    spent = sum(row.amount for row in pair.ledger()) if kind == "tenant" else 0
    budget = spent + 21 * COST + COST // 2
    set_budget(pair.database, pair.caller.tenant_id, budget, holder=holder, alerts=(80, 100))
    answers = pair.ask_all(key=key)
    assert passed(answers) == 21
    refused = [answer for answer in answers if not answer.is_success]
    codes = {answer.json()["error"]["code"] for answer in refused}
    assert codes <= {"budget_exhausted", "rate_limited"}, "the latter while others run"
    headers = {"authorization": f"Bearer {key}"}
    for client in pair.clients:
        last = client.post("/v1/completions", json=SHORT, headers=headers)
        assert last.status_code == 429
        assert last.json()["error"]["code"] == "budget_exhausted"
        assert last.headers["x-should-retry"] == "false"
    rows = [row for row in pair.ledger() if row.key_id == key_id]
    assert [row.amount for row in rows] == [COST] * 21
    assert {row.user_id for row in rows} == {user_id}
    with pair.database.transaction(pair.caller.tenant_id) as session:
        (spending,) = budgets.list_spendings(session, holder)
        assert (spending.spent, spending.reserved) == (spent + 21 * COST, 0)
        budgets.remove_budget(session, holder, Period.MONTH)
    wait_for(lambda: alerts_in_audit(pair, holder) == {80, 100}, seconds=10)


def alerts_in_audit(pair: Pair, holder: str) -> set[int]:
    entries = pair.caller.http.get("/v1/audit?action=budget.alert").json()["data"]
    percents = [entry["details"]["percent"] for entry in entries if entry["resource"] == holder]
    assert len(percents) == len(set(percents)), "each is announced once"
    return set(percents)


@pytest.mark.parametrize("kind", ["user", "key"])
def test_limits_of_a_user_and_of_a_key(pair: Pair, kind: str) -> None:
    pair.limit()
    user_id, key_id, key = pair.key_of_user(f"limited-{kind}@acme.example")
    path = f"/v1/users/{user_id}" if kind == "user" else f"/v1/keys/{key_id}"
    limits = {"requests_per_minute": 20}
    assert pair.caller.http.put(f"{path}/limits", json=limits).is_success
    num_passed, seconds = timed(lambda: pair.ask_all(key=key))
    assert 20 <= num_passed <= 20 + seconds * 20 / 60
    assert pair.clients[0].post("/v1/completions", json=SHORT).is_success, "others are not limited"
    assert pair.caller.http.put(f"{path}/limits", json={}).is_success


def test_a_killed_servers_requests_count_until_they_expire(pair: Pair) -> None:
    """The last test of the pair: one of the two is gone after it."""
    pair.limit(concurrent_requests=2)
    client, doomed = pair.clients
    with ExitStack() as stack:
        for _ in range(2):
            stream = stack.enter_context(doomed.stream("POST", "/v1/completions", json=LONG))
            assert stream.is_success
        pair.servers[1].process.kill()
        pair.servers[1].process.wait()
        refused = client.post("/v1/completions", json=SHORT)
        assert refused.json()["error"]["code"] == "too_many_requests_at_once"
        _let_time_pass(pair.database, quotas.LEASE_SECONDS)
        assert client.post("/v1/completions", json=SHORT).is_success
    assert (
        len(pair.reservations()) == 2
    )  # they count no more, and stay until their rows are written


def tokens_of(rows: Sequence[UsageRecord]) -> int:
    return sum(row.prompt_tokens + row.completion_tokens for row in rows)


def _let_time_pass(database: Database, seconds: float) -> None:
    """Age the reservations instead of waiting."""
    with database.platform_transaction() as session:
        for row in session.scalars(select(Reservation)):
            row.expires_at -= seconds
