"""Limits over HTTP: set by operators, shown to tenants, reported with every response."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from sqlalchemy import select

from loraplex.api.cli import main
from loraplex.api.http.limit_headers import duration, limit_headers
from loraplex.platform.audit.models import AuditEntry
from loraplex.platform.keys.principal import OperatorRole
from loraplex.platform.quotas.models import RateKind
from loraplex.platform.quotas.service import RateStanding
from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest
from support.waiting import wait_for

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def operator(server: ServerUnderTest) -> Iterator[httpx.Client]:
    key = server.make_operator("quotas-admin")
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}) as client:
        yield client


@pytest.fixture
def limit(operator: httpx.Client, caller: Caller) -> Callable[..., dict[str, Any]]:
    """Sets the caller's limits."""

    def put(**limits: Any) -> dict[str, Any]:
        answer = operator.put(f"/admin/tenants/{caller.slug}/quota", json=limits)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    return put


def complete(caller: Caller, **changes: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, **changes}
    return caller.http.post("/v1/completions", json=body)


def use_of(caller: Caller) -> dict[str, Any]:
    answer = caller.http.get("/v1/quota")
    assert answer.status_code == 200
    use: dict[str, Any] = answer.json()
    return use


def num_running(caller: Caller) -> int:
    number: int = use_of(caller)["concurrent_requests"]["used"]
    return number


def test_without_limits_answers_say_nothing_of_them(caller: Caller) -> None:
    answer = complete(caller)
    assert answer.is_success
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
    use = use_of(caller)
    assert use["requests_per_minute"]["limit"] is None
    assert use["concurrent_requests"]["used"] is None


def test_answers_and_refusals_say_what_is_left(
    caller: Caller, limit: Callable[..., dict[str, Any]]
) -> None:
    limit(requests_per_minute=2, output_tokens_per_minute=1000)
    answer = complete(caller)
    assert answer.is_success
    assert answer.headers["x-ratelimit-limit-requests"] == "2"
    assert answer.headers["x-ratelimit-remaining-requests"] == "1"
    assert answer.headers["x-ratelimit-reset-requests"] == "30s"
    assert answer.headers["x-ratelimit-limit-tokens"] == "1000"
    assert answer.headers["x-ratelimit-remaining-tokens"] == "996"
    complete(caller)
    refused = complete(caller)
    check_envelope(refused, "rate_limited")
    assert refused.headers["x-should-retry"] == "true"
    assert 10_000 < int(refused.headers["retry-after-ms"]) <= 30_000, "until the next is due"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert "2 requests per minute" in refused.json()["error"]["message"]


def test_streams_say_it_too(caller: Caller, limit: Callable[..., dict[str, Any]]) -> None:
    limit(requests_per_minute=5)
    raw = caller.openai.completions.with_raw_response.create(
        model="tiny", prompt=PROMPT, max_tokens=2, stream=True
    )
    assert raw.headers["x-ratelimit-remaining-requests"] == "4"
    assert list(raw.parse())


def test_the_official_client_does_not_retry_what_no_waiting_mends(
    caller: Caller, limit: Callable[..., dict[str, Any]]
) -> None:
    limit(tokens_per_period=10)
    assert complete(caller).is_success
    client = caller.openai.with_options(max_retries=5)
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4)
    assert refused.value.code == "insufficient_quota"
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert "2 are left, and this may use 8" in refused.value.message
    budget = use_of(caller)["tokens_per_period"]
    assert (budget["used"], budget["reserved"], budget["remaining"]) == (8, 0, 2)


def test_the_output_that_was_not_generated_is_given_back(
    caller: Caller, limit: Callable[..., dict[str, Any]]
) -> None:
    text = complete(caller, temperature=0).json()["choices"][0]["text"]
    limit(output_tokens_per_minute=100, tokens_per_period=1000)
    answer = complete(caller, temperature=0, max_tokens=60, stop=[text])
    num_tokens = answer.json()["usage"]["completion_tokens"]
    assert num_tokens < 60
    assert answer.headers["x-ratelimit-remaining-tokens"] == "40"
    use = use_of(caller)
    assert use["output_tokens_per_minute"]["remaining"] >= 100 - num_tokens
    assert use["tokens_per_period"]["used"] == 2 * len(PROMPT) + 4 + num_tokens


def test_counts_requests_at_once_and_lets_them_go_when_their_caller_goes(
    caller: Caller, limit: Callable[..., dict[str, Any]]
) -> None:
    limit(concurrent_requests=1)
    long = {"model": "tiny", "prompt": PROMPT, "max_tokens": 480, "ignore_eos": True}
    body = {**long, "n": 8, "speculation": "off", "temperature": 1.0, "stream": True}
    with caller.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()  # kept: without it the stream is closed
        next(lines)
        refused = complete(caller)
        check_envelope(refused, "too_many_requests_at_once")
        assert refused.headers["x-should-retry"] == "true"
    wait_for(lambda: num_running(caller) == 0, seconds=20)
    assert complete(caller).is_success


@pytest.mark.parametrize(
    "changes",
    [{"model": "nobody/has-this"}, {"prompt": [10**6]}, {"max_tokens": 10**6}, {"n": 99}],
)
def test_a_request_that_never_runs_leaves_nothing_behind(
    caller: Caller,
    limit: Callable[..., dict[str, Any]],
    changes: dict[str, Any],
) -> None:
    limit(input_tokens_per_minute=100, output_tokens_per_minute=100, tokens_per_period=10**9)
    assert complete(caller, **changes).is_client_error
    wait_for(lambda: num_running(caller) == 0, seconds=20)
    use = use_of(caller)
    assert use["tokens_per_period"]["used"] == use["tokens_per_period"]["reserved"] == 0
    for rate in ("input_tokens_per_minute", "output_tokens_per_minute"):
        assert use[rate]["remaining"] == 100


# --- what a tenant owns -------------------------------------------------------------------------


def test_refuses_an_upload_for_which_there_is_no_room(
    caller: Caller, limit: Callable[..., dict[str, Any]], adapters: list[Path]
) -> None:
    pushed = caller.push(adapters[0], "bot")
    size = use_of(caller)["stored_bytes"]["used"]
    assert size == pushed["size_bytes"]
    upload = {"config": {}, "size_bytes": 1, "sha256": "0" * 64}
    for limits, name, what in (
        ({"adapters": 1}, "other", "1 adapters"),
        ({"versions_per_adapter": 1}, "bot", "1 versions of one adapter"),
        ({"stored_bytes": size}, "bot", f"{size} stored bytes"),
    ):
        limit(**limits)
        refused = caller.http.post(f"/v1/adapters/{name}/uploads", json=upload)
        check_envelope(refused, "quota_exceeded")
        assert what in refused.json()["error"]["message"]
    again = caller.push(adapters[0], "bot", aliases=["prod"])
    assert again["version"] == pushed["version"], "what is there already takes no room"


def test_refuses_the_version_that_grew_beyond_the_room_while_it_was_pushed(
    caller: Caller, limit: Callable[..., dict[str, Any]], adapters: list[Path]
) -> None:
    caller.push(adapters[0], "bot")
    weights = (adapters[1] / "adapter_model.safetensors").read_bytes()
    upload = _begin_upload(caller, adapters[1], weights)
    limit(versions_per_adapter=1)
    caller.http.put(
        f"/v1/uploads/{upload}/content?offset=0",
        content=weights,
        headers={"content-type": "application/octet-stream"},
    )
    for _ in range(2):
        refused = caller.http.post(f"/v1/uploads/{upload}/commit")
        check_envelope(refused, "quota_exceeded")
    assert use_of(caller)["versions_per_adapter"]["used"] == 1


def _begin_upload(caller: Caller, folder: Path, weights: bytes) -> str:
    declaration = {
        "config": json.loads((folder / "adapter_config.json").read_text()),
        "size_bytes": len(weights),
        "sha256": hashlib.sha256(weights).hexdigest(),
    }
    upload_id: str = caller.http.post("/v1/adapters/bot/uploads", json=declaration).json()["id"]
    return upload_id


# --- the limits themselves ----------------------------------------------------------------------


def test_operators_replace_limits_as_they_read_them(caller: Caller, operator: httpx.Client) -> None:
    path = f"/admin/tenants/{caller.slug}/quota"
    before = operator.get(path)
    assert before.json()["tenant"] == caller.slug
    body = {"keys": 5, "period": "day"}
    changed = operator.put(path, json=body, headers={"if-match": before.headers["etag"]})
    assert changed.json() == {**before.json(), **body}
    assert operator.get(path).headers["etag"] == changed.headers["etag"]
    stale = operator.put(path, json={}, headers={"if-match": before.headers["etag"]})
    check_envelope(stale, "etag_mismatch")
    assert operator.get(path).json() == changed.json()


@pytest.mark.parametrize(
    "body",
    [{"requests_per_minute": 0}, {"keys": -1}, {"users": 2**31}, {"period": "week"}, {"key": 1}],
)
def test_refuses_limits_that_make_no_sense(
    caller: Caller, operator: httpx.Client, body: dict[str, Any]
) -> None:
    refused = operator.put(f"/admin/tenants/{caller.slug}/quota", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == next(iter(body))


def test_nobody_else_sets_limits(caller: Caller, server: ServerUnderTest) -> None:
    path = f"/admin/tenants/{caller.slug}/quota"
    check_envelope(caller.http.get(path), "insufficient_scope")
    check_envelope(caller.http.put(path, json={}), "insufficient_scope")
    viewer = server.make_operator("quotas-viewer", OperatorRole.VIEWER)
    headers = {"authorization": f"Bearer {viewer}"}
    assert httpx.get(server.url + path, headers=headers).is_success
    refused = httpx.put(server.url + path, headers=headers, json={})
    check_envelope(refused, "insufficient_scope")


def test_a_tenant_that_is_not_there_has_no_limits(operator: httpx.Client) -> None:
    check_envelope(operator.get("/admin/tenants/nobody/quota"), "tenant_not_found")
    check_envelope(operator.put("/admin/tenants/nobody/quota", json={}), "tenant_not_found")


def test_every_change_is_in_the_audit_log(
    caller: Caller, limit: Callable[..., dict[str, Any]], server: ServerUnderTest
) -> None:
    limit(keys=5)
    limit(keys=5)
    limit(keys=5, users=2)
    database = server.database
    with database.transaction(caller.tenant_id, read_only=True) as session:
        entries = session.scalars(select(AuditEntry).order_by(AuditEntry.number)).all()
    database.close()
    assert [(entry.action, entry.details) for entry in entries] == [
        ("quota.set", {"keys": 5}),
        ("quota.set", {"users": 2}),
    ]


# --- the commands -------------------------------------------------------------------------------


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: ServerUnderTest
) -> Callable[..., tuple[int, str]]:
    """Runs `loraplex quotas` with a key; exit code and what it printed."""

    def run(key: str, *arguments: str) -> tuple[int, str]:
        monkeypatch.setenv("LORAPLEX_URL", server.url)
        monkeypatch.setenv("LORAPLEX_API_KEY", key)
        monkeypatch.setattr("sys.argv", ["loraplex", "quotas", *arguments])
        try:
            code = main()
        except SystemExit as exc:
            code = int(exc.code or 0)
        output = capsys.readouterr()
        return code, output.out + output.err

    return run


def test_the_commands_set_what_is_named_and_show_what_is_left(
    command: Callable[..., tuple[int, str]], caller: Caller, operator: httpx.Client
) -> None:
    operator_key = operator.headers["authorization"].removeprefix("Bearer ")
    command(operator_key, "set", caller.slug, "--keys", "7", "--requests-per-minute", "5")
    code, out = command(operator_key, "set", caller.slug, "--keys", "none", "--users=2", "--json")
    assert code == 0
    limits = json.loads(out)
    assert (limits["keys"], limits["users"], limits["requests_per_minute"]) == (None, 2, 5)
    complete(caller)
    for key, options in ((caller.key, []), (operator_key, ["--tenant", caller.slug])):
        code, out = command(key, "show", "--json", *options)
        assert code == 0
        assert json.loads(out)["requests_per_minute"]["remaining"] == 4
    _, table = command(caller.key, "show")
    row = next(line for line in table.splitlines() if line.startswith("requests_per_minute"))
    assert row.split()[1:5] == ["5", "1", "0", "4"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["set", "nobody", "--keys", "1"], 4),
        (["set", "nobody"], 2),
        (["set", "nobody", "--keys", "many"], 2),
        (["show"], 2),
    ],
)
def test_the_commands_say_what_is_wrong(
    command: Callable[..., tuple[int, str]],
    operator: httpx.Client,
    arguments: list[str],
    code: int,
) -> None:
    key = operator.headers["authorization"].removeprefix("Bearer ")
    assert command(key, *arguments)[0] == code


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.0115, "12ms"),
        (0.9999, "1s"),
        (1.0, "1s"),
        (7.66, "7.66s"),
        (59.9999, "1m0s"),
        (60.0, "1m0s"),
        (61.5, "1m1.5s"),
        (3600.0, "60m0s"),
    ],
)
def test_writes_durations_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_headers_tell_of_requests_and_of_the_token_rate_with_less_left() -> None:
    requests = RateStanding(limit=2, remaining=1, reset_seconds=30.0)
    tokens = RateStanding(limit=100, remaining=40, reset_seconds=36.0)
    standing = {
        RateKind.REQUESTS: requests,
        RateKind.INPUT_TOKENS: RateStanding(limit=50, remaining=50, reset_seconds=0.0),
        RateKind.OUTPUT_TOKENS: tokens,
    }
    assert limit_headers(standing) == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "30s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "40",
        "x-ratelimit-reset-tokens": "36s",
    }
    assert limit_headers({}) == {}


def test_a_limit_that_nobody_knows_may_be_null(limit: Callable[..., dict[str, Any]]) -> None:
    assert limit(users=3, unknown=None)["users"] == 3


@pytest.mark.slow  # as long as SQLite waits for a lock
def test_a_database_that_others_hold_for_too_long_lets_nobody_past_the_limits(
    server: ServerUnderTest, caller: Caller, limit: Callable[..., dict[str, Any]]
) -> None:
    if not server.settings.is_database_embedded:
        pytest.skip("PostgreSQL has room for more than one writer")
    limit(requests_per_minute=2)
    assert complete(caller).is_success
    other = sqlite3.connect(server.settings.data_dir / "loraplex.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        check_envelope(complete(caller), "database_unavailable")
    finally:
        other.execute("ROLLBACK")
        other.close()
    wait_for(lambda: num_running(caller) == 0)
    assert complete(caller).is_success, "what was refused was not counted"
    check_envelope(complete(caller), "rate_limited")
