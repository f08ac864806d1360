"""The request log: results, phases, and running requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from openai import APIError

from loraplex.api.routes.requests import _is_theirs, explain_request
from loraplex.api.telemetry.request_explanation import phases_of
from loraplex.platform.errors import RequestNotFound
from loraplex.platform.requests.models import RequestLogEntry
from loraplex.platform.tenants.models import Tenant
from support.identity import caller_of
from support.server import Caller, ServerUnderTest
from support.waiting import wait_for


@pytest.fixture(scope="module")
def operator(server: ServerUnderTest) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {server.make_operator('request-log-operator')}"}
    with httpx.Client(base_url=server.url, headers=headers) as client:
        yield client


def generate(caller: Caller, model: str = "tiny", **options: Any) -> str:
    """The id of a finished request."""
    raw = caller.openai.completions.with_raw_response.create(
        model=model,
        prompt="once",
        extra_body={"ignore_eos": True},
        **{"max_tokens": 2, **options},
    )
    return str(raw.headers["x-request-id"])


def get(caller: Caller, path: str, **query: Any) -> Any:
    response = caller.http.get(path, params=query)
    assert response.status_code == 200, response.text
    return response.json()


def live(caller: Caller) -> list[dict[str, Any]]:
    return list(get(caller, "/v1/requests/live")["data"])


def start_endless_stream(caller: Caller) -> tuple[threading.Thread, list[str]]:
    """A generation of many tokens, and the codes that it ends with."""
    codes: list[str] = []

    def read() -> None:
        try:
            for _ in caller.openai.completions.create(
                model="tiny",
                prompt="once",
                max_tokens=200,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                pass
            codes.append("none")
        except APIError as error:
            codes.append(str(error.code))

    thread = threading.Thread(target=read)
    thread.start()
    return thread, codes


def test_an_answered_request_tells_where_its_time_went(
    caller: Caller, adapters: list[Path]
) -> None:
    caller.push(adapters[0], "bot")
    explained = get(caller, f"/v1/requests/{generate(caller, 'bot')}")
    request, phases = explained["request"], explained["phases"]
    assert (request["status"], request["model"]) == (200, f"{caller.slug}/bot@1")
    assert (request["adapter"], request["adapter_version"]) == ("bot", 1)
    assert request["completion_tokens"] == 2
    assert [phase["phase"] for phase in phases] == ["queue", "adapter", "prompt", "output"]
    assert sum(phase["ms"] for phase in phases) == pytest.approx(request["total_ms"], rel=0.01)
    assert "ms: It" in explained["summary"]


def test_a_refused_request_tells_why(caller: Caller) -> None:
    with pytest.raises(APIError) as refusal:
        generate(caller, "nobody")
    response: httpx.Response = refusal.value.response  # type: ignore[attr-defined]
    explained = get(caller, f"/v1/requests/{response.headers['x-request-id']}")
    assert explained["request"]["error_code"] == "model_not_found"
    assert explained["request"]["model"] == "nobody"
    assert "`model_not_found`" in explained["summary"]
    assert [phase["phase"] for phase in explained["phases"]] == ["refused"]


@pytest.mark.parametrize(
    ("body", "status", "model"),
    [
        ({"model": "acme/other@7", "prompt": "x"}, 404, "acme/other@7"),
        ({"model": "tiny", "prompt": "x", "temperature": 9}, 400, "tiny"),
        ({"model": "tiny", "prompt": [[1] * 10_000]}, 400, "tiny"),
        ({"model": "n" * 640, "prompt": "x"}, 404, "n" * 200),
        ({"model": "n" * 641, "prompt": "x"}, 400, "n" * 200),
        ({"model": "a\u0000b\nc\u202e", "prompt": "x"}, 404, "a\ufffdb\ufffdc\ufffd"),
        ({"model": ["tiny"], "prompt": "x"}, 400, None),
        ({"prompt": "x"}, 400, None),
    ],
)
def test_a_refused_request_says_which_model_was_asked_for(
    caller: Caller, body: dict[str, Any], status: int, model: str | None
) -> None:
    answer = caller.http.post("/v1/completions", json=body)
    assert answer.status_code == status, answer.text
    logged = get(caller, f"/v1/requests/{answer.headers['x-request-id']}")["request"]
    assert logged["model"] == model
    assert (logged["adapter"], logged["adapter_version"]) == (None, None)


def test_the_log_is_given_newest_first_in_pages_and_filtered(caller: Caller) -> None:
    ids = [generate(caller) for _ in range(5)]
    with pytest.raises(APIError):
        generate(caller, "nobody")
    first = get(caller, "/v1/requests", limit=4)
    second = get(caller, "/v1/requests", limit=4, after=first["next_after"])
    assert (first["has_more"], second["has_more"]) == (True, False)
    listed = [entry["id"] for entry in (*first["data"], *second["data"])]
    assert listed[1:] == ids[::-1]
    (refused,) = get(caller, "/v1/requests", code="model_not_found")["data"]
    assert refused["id"] == listed[0]
    between = get(caller, "/v1/requests", since=first["data"][2]["created_at"], status=200)["data"]
    assert [entry["id"] for entry in between] == listed[1:3]


@pytest.mark.parametrize("after", ["x", "2026-01-01~", "~req-1", "2026-01-01T00:00:00"])
def test_what_is_no_cursor_is_refused(caller: Caller, after: str) -> None:
    response = caller.http.get("/v1/requests", params={"after": after})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "after")


def test_a_running_request_is_listed_and_can_be_ended_by_its_tenant_alone(
    make_caller: Callable[[], Caller],
) -> None:
    mine, other = make_caller(), make_caller()
    thread, codes = start_endless_stream(mine)
    wait_for(lambda: any(entry["state"] == "decoding" for entry in live(mine)), seconds=30)
    (entry,) = live(mine)
    assert (entry["tenant"], entry["model"]) == (mine.slug, "tiny")
    assert live(other) == []
    path = f"/v1/requests/{entry['request_id']}"
    assert other.http.delete(path).status_code == 404
    assert mine.http.delete(path).status_code == 204
    thread.join(30)
    assert codes == ["request_cancelled"]
    wait_for(lambda: live(mine) == [], seconds=30)
    explained = get(mine, path)
    assert explained["request"]["error_code"] == "request_cancelled"


@pytest.mark.parametrize(
    ("tenant", "adapters", "adapter", "expected"),
    [
        ("acme", None, "bot", True),
        ("acme", None, None, True),
        ("acme", ["bot"], "bot", True),
        ("acme", ["bot"], "other", False),
        ("acme", ["bot"], None, False),
        ("globex", None, "bot", False),
    ],
)
def test_a_running_request_is_its_tenants_and_a_restricted_keys_only_for_its_adapters(
    tenant: str, adapters: list[str] | None, adapter: str | None, expected: bool
) -> None:
    model = SimpleNamespace(adapters=[SimpleNamespace(name=adapter)] if adapter else [])
    order = SimpleNamespace(principal=caller_of(Tenant(id="acme", slug="acme")), model=model)
    caller = caller_of(Tenant(id=tenant, slug=tenant), adapters=adapters)
    assert _is_theirs(cast(Any, SimpleNamespace(order=order)), caller) is expected


@pytest.mark.parametrize("adapter", ["other", None])
def test_a_restricted_key_reads_nothing_of_requests_to_what_it_may_not_use(
    adapter: str | None,
) -> None:
    async def flush() -> None:
        pass

    async def read(*_: object) -> RequestLogEntry:
        return RequestLogEntry(adapter_name=adapter)

    runtime = SimpleNamespace(
        request_log=SimpleNamespace(flush=flush), control_plane=SimpleNamespace(read=read)
    )
    caller = caller_of(Tenant(id="acme", slug="acme"), adapters=["bot"])
    with pytest.raises(RequestNotFound):
        asyncio.run(explain_request(cast(Any, runtime), caller, "req-1"))


def test_a_request_that_was_ended_while_it_waited_was_not_refused() -> None:
    waited = RequestLogEntry(error_code="request_cancelled", finish_reason="aborted", total_ms=7.0)
    (phase,) = phases_of(waited)
    assert (phase.phase, phase.ms) == ("queue", 7.0)
    (phase,) = phases_of(RequestLogEntry(error_code="model_not_found", total_ms=7.0))
    assert phase.phase == "refused"


def test_an_operator_sees_everybodys_requests(
    make_caller: Callable[[], Caller], operator: httpx.Client
) -> None:
    callers = [make_caller(), make_caller()]
    ids = [generate(caller) for caller in callers]
    newest = operator.get("/admin/requests", params={"limit": 2}).json()["data"]
    assert [(entry["id"], entry["tenant"]) for entry in newest] == [
        (ids[1], callers[1].slug),
        (ids[0], callers[0].slug),
    ]
    explained = operator.get(f"/admin/requests/{ids[0]}").json()
    assert explained["request"]["tenant"] == callers[0].slug
    assert callers[0].http.get("/admin/requests").status_code == 403
