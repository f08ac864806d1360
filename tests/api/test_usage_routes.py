"""Usage as tenants and operators see it."""

from __future__ import annotations

import csv
import io
import json
import subprocess
from collections.abc import Callable
from datetime import date, timedelta
from typing import Any

import httpx
import pytest

from loraplex.platform.base import utc_now
from loraplex.platform.usage import service as ledger
from loraplex.platform.usage.service import Usage
from support.envelopes import check_envelope
from support.server import LORAPLEX, Caller, ServerUnderTest, child_environment

DAY = date(2026, 3, 1)


def add(server: ServerUnderTest, caller: Caller, **fields: Any) -> None:
    usage = Usage(
        **{
            "prompt_tokens": 10,
            "cached_tokens": 4,
            "completion_tokens": 3,
            "finish_reason": "stop",
            **fields,
        }
    )
    database = server.database
    with database.transaction(caller.tenant_id) as session:
        ledger.record(session, usage)
    database.close()


@pytest.fixture
def used(server: ServerUnderTest, make_caller: Callable[[], Caller]) -> Caller:
    """A tenant that used three versions and the base model on two days."""
    caller = make_caller()
    for day in (DAY, DAY + timedelta(days=1)):
        for name, version in ((None, None), ("bot", 1), ("bot", 2), ("sql", 1)):
            add(
                server,
                caller,
                request_id=f"{caller.slug}-{day}-{name}-{version}",
                adapter_name=name,
                adapter_version=version,
                adapter_digest=name and "sha256:1",
                tier=name and "host",
                key_id="key",
                load_ms=5.0 if version == 2 else None,
                ended_at=utc_now().replace(year=day.year, month=day.month, day=day.day),
            )
    return caller


def get(caller: Caller, path: str = "/v1/usage", **query: Any) -> Any:
    answer = caller.http.get(path, params=query)
    assert answer.is_success, answer.text
    return answer.json()


def used_currency(rows: list[dict[str, Any]]) -> str | None:
    """That of the server's prices, which other tests may have set: the same in all rows."""
    currencies: set[str | None] = {row["currency"] for row in rows}
    assert len(currencies) == 1
    assert currencies <= {None, "EUR"}
    return currencies.pop()


def test_sums_come_by_day_adapter_and_version_in_pages(used: Caller) -> None:
    first = get(used, limit=3)
    currency = used_currency(first["data"])
    assert first["data"][0] == {
        "day": "2026-03-01",
        "adapter": None,
        "version": None,
        "requests": 1,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "completion_tokens": 3,
        "cold_loads": 0,
        "residency_byte_seconds": 0,
        "trained_tokens": 0,
        "amount": "0.00",
        "currency": currency,
        "step_seconds": 0.0,
        "kv_byte_seconds": 0,
        "loaded_bytes": 0,
        "fetched_bytes": 0,
    }
    rows, page = first["data"], first
    while page["has_more"]:
        page = get(used, limit=3, after=page["next_after"])
        rows += page["data"]
    keys = [(row["day"], row["adapter"], row["version"]) for row in rows]
    names = [(None, None), ("bot", 1), ("bot", 2), ("sql", 1)]
    assert keys == [(day, *name) for day in ("2026-03-01", "2026-03-02") for name in names]


@pytest.mark.parametrize("version", ["9" * 30, "-" + "9" * 30])
def test_a_page_may_begin_anywhere(used: Caller, version: str) -> None:
    rows = get(used, after=f"2026-03-01/bot/{version}")["data"]
    versions = [row["version"] for row in rows if row["day"] == "2026-03-01"]
    assert versions == ([1] if version[0] == "9" else [1, 2, 1])


def test_the_caller_says_what_is_summed(used: Caller) -> None:
    (total,) = get(used, group_by="day", until="2026-03-02")["data"]
    assert (total["day"], total["requests"], total["prompt_tokens"]) == ("2026-03-01", 4, 40)
    assert "adapter" not in total
    bots = get(used, group_by=["version"], adapter="bot", since="2026-03-02")["data"]
    assert [(row["adapter"], row["version"], row["cold_loads"]) for row in bots] == [
        ("bot", 1, 0),
        ("bot", 2, 1),
    ]
    (base,) = get(used, group_by="adapter", adapter="")["data"]
    assert (base["adapter"], base["requests"]) == (None, 2)


def test_csv_has_everything_in_one_answer(used: Caller) -> None:
    answer = used.http.get("/v1/usage", params={"limit": 1}, headers={"accept": "text/csv"})
    assert answer.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert len(rows) == 8
    listed = get(used)["data"]
    for row, entry in zip(rows, listed, strict=True):
        assert row["day"] == entry["day"]
        assert row["adapter"] == (entry["adapter"] or "")
        assert row["completion_tokens"] == str(entry["completion_tokens"])


def test_the_format_that_the_query_names_wins_over_the_header(caller: Caller) -> None:
    for name, other, expected in (
        ("json", "text/csv", "application/json"),
        ("csv", "application/json", "text/csv"),
    ):
        answer = caller.http.get("/v1/usage", params={"format": name}, headers={"accept": other})
        assert answer.headers["content-type"].startswith(expected)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"after": "2026-03-01/bot"}, "after"),
        ({"after": "x/bot/1"}, "after"),
        ({"since": "yesterday"}, "since"),
        ({"group_by": "tenant"}, "group_by"),
        ({"group_by": "hour"}, "group_by.0"),
    ],
)
def test_what_the_query_cannot_mean_is_refused(
    caller: Caller, query: dict[str, str], param: str
) -> None:
    check_envelope(caller.http.get("/v1/usage", params=query), "invalid_parameter", param)


def test_a_request_can_be_looked_up_by_its_tenant_alone(used: Caller, caller: Caller) -> None:
    request_id = f"{used.slug}-2026-03-01-bot-2"
    row = get(used, f"/v1/usage/requests/{request_id}")
    assert (row["request_id"], row["key_id"]) == (request_id, "key")
    assert (row["adapter"], row["version"], row["digest"]) == ("bot", 2, "sha256:1")
    assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == (10, 4, 3)
    assert (row["finish_reason"], row["tier"], row["load_ms"]) == ("stop", "host", 5.0)
    assert row["ended_at"].startswith("2026-03-01T")
    foreign, missing = (
        caller.http.get(f"/v1/usage/requests/{name}") for name in (request_id, "req-none")
    )
    bodies = []
    for answer in (foreign, missing):
        check_envelope(answer, "request_not_found")
        bodies.append({**answer.json()["error"], "request_id": None})
    assert bodies[0] == bodies[1]


def test_operators_see_all_tenants_or_one(server: ServerUnderTest, used: Caller) -> None:
    headers = {"authorization": f"Bearer {server.make_operator(used.slug)}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60.0) as operator:
        query = {"group_by": ["tenant", "day"], "tenant": used.slug}
        rows = operator.get("/admin/usage", params=query).json()["data"]
        assert [(row["tenant"], row["day"], row["requests"]) for row in rows] == [
            (used.slug, "2026-03-01", 4),
            (used.slug, "2026-03-02", 4),
        ]
        everybody = operator.get("/admin/usage", params={"group_by": "tenant", "limit": 500})
        assert used.slug in [row["tenant"] for row in everybody.json()["data"]]
        own = operator.get(
            "/v1/usage", params={"group_by": "day"}, headers={"x-loraplex-tenant": used.slug}
        )
        assert len(own.json()["data"]) == 2
    check_envelope(used.http.get("/admin/usage"), "insufficient_scope")


def test_operators_alone_see_costs_and_margins(server: ServerUnderTest, caller: Caller) -> None:
    used = {"step_nanoseconds": 2_500_000_000, "kv_byte_seconds": 10**12, "loaded_bytes": 9}
    for number, amount in enumerate((10**8, 5 * 10**8)):
        request_id = f"{caller.slug}-{number}"
        add(server, caller, request_id=request_id, amount=amount, cost=4 * 10**8, **used)
    headers = {"authorization": f"Bearer {server.make_operator(caller.slug)}"}
    query = {"group_by": "tenant", "tenant": caller.slug}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60.0) as operator:
        (row,) = operator.get("/admin/usage", params=query).json()["data"]
        text = operator.get("/admin/usage", params={**query, "format": "csv"}).text
    assert (row["amount"], row["cost"], row["margin"]) == ("0.60", "0.80", "-0.20")
    (line,) = csv.DictReader(io.StringIO(text))
    assert (line["cost"], line["margin"], line["step_seconds"]) == ("0.80", "-0.20", "5.0")
    (own,) = get(caller, group_by="adapter")["data"]
    assert (own["step_seconds"], own["kv_byte_seconds"], own["loaded_bytes"]) == (
        5.0,
        2 * 10**12,
        18,
    )
    assert not {"cost", "margin"} & own.keys()
    record = get(caller, f"/v1/usage/requests/{caller.slug}-0")
    assert (record["step_seconds"], record["kv_byte_seconds"]) == (2.5, 10**12)
    assert "cost" not in record
    csv_of_tenant = caller.http.get("/v1/usage", params={"format": "csv"}).text
    assert "cost" not in csv_of_tenant.splitlines()[0].split(",")


@pytest.mark.parametrize("fields", [{}, {"stop": ["e", "a", "o", "i", " "], "n": 2}])
def test_a_request_has_used_the_engine_however_it_ends(
    caller: Caller, server: ServerUnderTest, fields: dict[str, Any]
) -> None:
    answer = caller.http.post(
        "/v1/completions", json={"model": "tiny", "prompt": "Hello", "max_tokens": 40, **fields}
    )
    assert answer.is_success, answer.text
    record = get(caller, f"/v1/usage/requests/{answer.headers['x-request-id']}")
    assert 0 < record["step_seconds"] < 60
    assert record["kv_byte_seconds"] > 0
    assert (record["loaded_bytes"], record["fetched_bytes"]) == (0, 0), "the base is always there"
    (sums,) = get(caller, group_by="day")["data"]
    assert sums["step_seconds"] == pytest.approx(record["step_seconds"])


def test_the_command_prints_what_the_api_says(used: Caller) -> None:
    def run(*options: str) -> str:
        environment = child_environment(LORAPLEX_URL=used.url, LORAPLEX_API_KEY=used.key)
        return subprocess.run(
            [*LORAPLEX, "usage", *options],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert json.loads(run("--json")) == get(used)["data"]
    bots = run("--csv", "--by", "version", "--adapter", "bot", "--until", "2026-03-02")
    header, first, second = csv.reader(io.StringIO(bots))
    assert header[:3] == ["adapter", "version", "requests"]
    assert [first[:3], second[:3]] == [["bot", "1", "1"], ["bot", "2", "1"]]
    head, *lines = run("--by", "adapter").splitlines()
    assert head.split()[:2] == ["adapter", "requests"]
    assert [line.split()[:2] for line in lines] == [["(base)", "2"], ["bot", "4"], ["sql", "2"]]


def test_operators_see_the_servers(server: ServerUnderTest, caller: Caller) -> None:
    headers = {"authorization": f"Bearer {server.make_operator(caller.slug)}"}
    servers = httpx.get(f"{server.url}/admin/servers", headers=headers).json()["data"]
    ours = (server.settings.data_dir / "server_id").read_text().strip()
    (seen,) = [each for each in servers if each["id"] == ours]
    assert seen["is_live"]
    assert seen["base_id"]
    check_envelope(caller.http.get("/admin/servers"), "insufficient_scope")


def test_an_answer_is_in_the_sums_when_its_caller_has_it(
    server: ServerUnderTest, caller: Caller
) -> None:
    row = None
    with caller.http.stream(
        "POST",
        "/v1/completions",
        json={"model": "tiny", "prompt": "Hello", "max_tokens": 6, "n": 2, "stream": True},
    ) as answer:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                row = server.usage_of(answer.headers["x-request-id"], caller)
                (sums,) = get(caller)["data"]
    assert row is not None
    assert (sums["requests"], sums["prompt_tokens"]) == (1, row.prompt_tokens)
    assert sums["completion_tokens"] == row.completion_tokens <= 12
