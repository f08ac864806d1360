"""`Idempotency-Key`: a repeated request gets the first response and is executed once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send
from structlog.testing import capture_logs

from loraplex.api.app import create_app
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.http.auth import origin_of
from loraplex.api.http.idempotency import (
    IdempotentRequests,
    _again,
    _is_concerned,
    _is_key,
    _replay,
)
from loraplex.platform.audit.event import Changed, Event
from loraplex.platform.database import Database
from loraplex.platform.errors import DatabaseUnavailable, IdempotencyInProgress
from loraplex.platform.idempotency.models import IdempotentAnswer
from loraplex.platform.idempotency.service import IdempotentAnswers, KeyedRequest
from loraplex.platform.keys.principal import OperatorPrincipal, OperatorRole
from loraplex.platform.sessions import UnitOfWork
from support.databases import copy_of_migrated_sqlite
from support.server import Caller, ServerUnderTest

GENERATIONS = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"}
GENERATIONS |= {
    "/classify",
    "/score",
    "/v1/classify",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
}
GENERATIONS |= {"/v1/messages", "/v1/messages/count_tokens"}
GENERATIONS |= {"/v1/tokenize", "/v1/detokenize", "/tokenize", "/detokenize"}
SIGNING_IN = {
    *("/v1/session", "/v1/sessions", "/v1/session/enrolment"),
    *("/v1/session/confirmation", "/v1/session/password"),
    *("/v1/session/oidc", "/v1/session/oidc/callback"),
}


def create_key(caller: Caller, key: str, name: str = "ci", **headers: str) -> httpx.Response:
    body = {"name": name, "scopes": ["infer"]}
    return caller.http.post("/v1/keys", json=body, headers={"idempotency-key": key, **headers})


def names_of_keys(caller: Caller) -> list[str]:
    return [key["name"] for key in caller.http.get("/v1/keys").json()["data"]]


def code(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


def test_a_repeated_request_is_answered_as_the_first_and_done_once(caller: Caller) -> None:
    first = create_key(caller, "k-1")
    again = create_key(caller, "k-1")
    assert first.status_code == 201
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert again.headers["content-type"] == first.headers["content-type"]
    assert again.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert again.headers["x-request-id"] != first.headers["x-request-id"]
    assert names_of_keys(caller).count("ci") == 1
    assert create_key(caller, "k-2").content != first.content
    assert names_of_keys(caller).count("ci") == 2


def test_what_is_kept_does_not_show_the_secret(server: ServerUnderTest, caller: Caller) -> None:
    secret = create_key(caller, "k-secret").json()["key"].encode()
    database = server.database
    with database.platform_transaction(read_only=True) as session:
        rows = session.query(IdempotentAnswer).filter_by(key="k-secret").all()
    database.close()
    kept = [row.answer or b"" for row in rows]
    assert any(kept)
    assert not any(secret in answer or secret[-20:] in answer for answer in kept)


def test_the_same_key_for_another_request_is_a_conflict(caller: Caller) -> None:
    create_key(caller, "k-1")
    assert code(create_key(caller, "k-1", "other")) == "idempotency_conflict"
    other_path = caller.http.post("/v1/users", headers={"idempotency-key": "k-1"})
    assert code(other_path) == "idempotency_conflict"
    assert "other" not in names_of_keys(caller)


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("POST", "/v1/users", {}),
        ("PUT", "/v1/keys", {}),
        ("POST", "/v1/keys?user=other", {}),
        ("POST", "/v1/keys", {"if-match": '"1"'}),
    ],
    ids=["path", "method", "query", "precondition"],
)
def test_the_same_key_and_body_are_a_conflict_where_they_ask_for_something_else(
    caller: Caller, method: str, path: str, headers: dict[str, str]
) -> None:
    body = {"name": "ci", "scopes": ["infer"]}

    def send(method: str, path: str, **headers: str) -> httpx.Response:
        return caller.http.request(
            method, path, json=body, headers={"idempotency-key": "k-1", **headers}
        )

    assert send("POST", "/v1/keys").status_code == 201
    assert code(send(method, path, **headers)) == "idempotency_conflict"


def test_keys_of_different_callers_never_meet(caller: Caller, resident: Caller) -> None:
    first = create_key(caller, "k-shared")
    second = create_key(resident, "k-shared")
    assert "idempotent-replayed" not in second.headers
    assert first.json()["id"] != second.json()["id"]


def test_two_keys_of_one_user_never_meet(server: ServerUnderTest, caller: Caller) -> None:
    user = caller.http.post("/v1/users", json={"email": "a@b.example", "role": "owner"}).json()
    body = {"name": "user's", "scopes": ["keys:manage", "infer"], "user": user["id"]}
    keys = [caller.http.post("/v1/keys", json=body).json()["key"] for _ in range(2)]
    twins = [Caller(server.url, caller.tenant_id, caller.slug, key) for key in keys]
    server.callers.extend(twins)
    answers = [create_key(twin, "k-1") for twin in twins]
    assert [answer.status_code for answer in answers] == [201, 201], answers[0].text
    assert answers[0].json()["key"] != answers[1].json()["key"]


def test_an_operators_key_for_another_tenant_is_a_conflict(
    server: ServerUnderTest, caller: Caller, resident: Caller
) -> None:
    operator = {"authorization": f"Bearer {server.make_operator('twice')}"}

    def create(tenant: Caller) -> httpx.Response:
        on_tenant = {"x-loraplex-tenant": tenant.slug, "idempotency-key": "k-operator"}
        body = {"name": "x", "scopes": ["infer"]}
        return httpx.post(f"{server.url}/v1/keys", json=body, headers=operator | on_tenant)

    assert create(caller).status_code == 201
    assert code(create(resident)) == "idempotency_conflict"


def test_what_was_refused_may_be_sent_again(caller: Caller) -> None:
    headers = {"idempotency-key": "k-1"}
    wrong = caller.http.post("/v1/keys", json={"name": ""}, headers=headers)
    assert wrong.status_code == 400
    assert create_key(caller, "k-1").status_code == 201
    for _ in range(2):
        missing = caller.http.delete("/v1/keys/nokeynokey00", headers={"idempotency-key": "k-2"})
        assert code(missing) == "key_not_found"
        assert "idempotent-replayed" not in missing.headers


def test_a_repeated_answer_has_the_tag_that_the_next_change_needs(caller: Caller) -> None:
    body, headers = {"email": "tag@acme.example", "role": "viewer"}, {"idempotency-key": "k-1"}
    first, again = (caller.http.post("/v1/users", json=body, headers=headers) for _ in range(2))
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["etag"] == first.headers["etag"]


def test_an_answer_without_a_body_is_repeated(caller: Caller, adapters: list[Path]) -> None:
    caller.push(adapters[0], "bot", aliases=["prod"])
    headers = {"idempotency-key": "k-1"}
    answers = [
        caller.http.delete("/v1/adapters/bot/aliases/prod", headers=headers) for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [204, 204]
    assert answers[1].headers["idempotent-replayed"] == "true"


@pytest.mark.parametrize("tenant_id", ["acme-id", None])
@pytest.mark.parametrize("is_noted", [False, True], ids=["changed", "noted"])
def test_a_request_whose_key_was_taken_changes_nothing(
    tmp_path: Path, tenant_id: str | None, is_noted: bool
) -> None:
    database = Database(copy_of_migrated_sqlite(tmp_path))
    plane = ControlPlane(database, b"secret")
    caller = OperatorPrincipal("id", "root", OperatorRole.ADMIN)
    event = Event("key.create", "k")
    changed: list[object] = []

    def change(session: UnitOfWork) -> Changed[None]:
        session.connection()
        changed.append(session)
        return Changed(None, event)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        origin = origin_of(Request(scope), caller)
        if is_noted:
            await plane.note(tenant_id, origin, event)
        else:
            await plane.change_own(tenant_id, origin, change)

    async def send(message: Message) -> None:
        pytest.fail("there is no answer")

    answers = IdempotentAnswers([b"secret"], "here")
    runtime = SimpleNamespace(control_plane=plane, idempotent_answers=answers)
    of_app = SimpleNamespace(state=SimpleNamespace(runtime=runtime))
    state = {"request_id": "req-1", "address": None}
    request = Request({"type": "http", "app": of_app, "state": state})
    keyed = KeyedRequest(owner="key", key="k", request_hash=b"h" * 32, request_id="req-1")
    try:
        with pytest.raises(IdempotencyInProgress):
            asyncio.run(IdempotentRequests(app)._run_once(request, keyed, b"", send))
    finally:
        plane.close()
    assert changed == []


@pytest.mark.parametrize("is_away", [False, True])
def test_an_answer_is_kept_before_it_is_given_and_given_where_it_cannot_be_kept(
    is_away: bool,
) -> None:
    steps: list[str] = []

    class ControlPlane:
        async def write_all_tenants(self, change: object) -> None:
            steps.append("keep")
            if is_away:
                raise DatabaseUnavailable

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"made"})

    async def send(message: Message) -> None:
        steps.append(message["type"])

    runtime = SimpleNamespace(control_plane=ControlPlane(), idempotent_answers=None)
    state = SimpleNamespace(runtime=runtime)
    request = Request({"type": "http", "app": SimpleNamespace(state=state)})
    keyed = KeyedRequest(owner="key", key="k", request_hash=b"h" * 32, request_id="req-1")
    with capture_logs() as logged:
        asyncio.run(IdempotentRequests(app)._run_once(request, keyed, b"", send))
    assert steps == ["keep", "http.response.start", "http.response.body"]
    not_kept = {"event": "answer_not_kept", "log_level": "warning", "request_id": "req-1"}
    assert logged == ([not_kept | {"error": str(DatabaseUnavailable())}] if is_away else [])


@pytest.mark.parametrize(
    ("status", "is_kept"), [(199, False), (200, True), (299, True), (300, False), (400, False)]
)
def test_an_answer_is_kept_whole_where_the_request_succeeded(status: int, is_kept: bool) -> None:
    kept: list[tuple[int, bytes]] = []
    given_up: list[str] = []

    class Answers:
        def finish(self, _: object, request: KeyedRequest, status: int, answer: bytes) -> None:
            kept.append((status, answer))

        def give_up(self, _: object, request: KeyedRequest) -> None:
            given_up.append(request.request_id)

    class ControlPlane:
        async def write_all_tenants(self, change: Callable[[None], None]) -> None:
            change(None)

    headers = [(b"etag", b'"7"'), (b"set-cookie", b"x=y"), (b"content-type", b"text/plain")]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"in two", "more_body": True})
        await send({"type": "http.response.body", "body": b" parts"})

    async def send(message: Message) -> None:
        pass

    runtime = SimpleNamespace(control_plane=ControlPlane(), idempotent_answers=Answers())
    state = SimpleNamespace(runtime=runtime)
    request = Request({"type": "http", "app": SimpleNamespace(state=state)})
    keyed = KeyedRequest(owner="key", key="k", request_hash=b"h" * 32, request_id="req-1")
    asyncio.run(IdempotentRequests(app)._run_once(request, keyed, b"", send))
    assert given_up == ([] if is_kept else ["req-1"])
    assert len(kept) == is_kept
    for each in kept:
        answer = _replay(*each)
        assert (answer.status_code, answer.body) == (status, b"in two parts")
        assert answer.raw_headers == [
            (b"content-length", b"12"),
            *((b"etag", b'"7"'), (b"content-type", b"text/plain")),
            (b"idempotent-replayed", b"true"),
        ]


def test_a_route_reads_the_body_that_was_read_for_the_hash() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def read() -> list[Message]:
        receive_again = _again(b"body", receive)
        return [await receive_again() for _ in range(2)]

    assert asyncio.run(read()) == [
        {"type": "http.request", "body": b"body", "more_body": False},
        {"type": "http.disconnect"},
    ]


@pytest.mark.parametrize("key", ["!", "~" * 255])
def test_a_key_may_be_as_short_and_as_long_as_is_promised(key: str) -> None:
    assert _is_key(key)


@pytest.mark.parametrize("key", ["", "x" * 256, "two words", "ü"])
def test_a_key_that_is_none_is_refused(caller: Caller, key: str) -> None:
    answer = caller.http.delete("/v1/keys/x", headers=[(b"idempotency-key", key.encode())])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "Idempotency-Key"


def test_without_a_right_key_it_says_so(server: ServerUnderTest) -> None:
    headers = {"idempotency-key": "k-1", "authorization": "Bearer lpx_live_unknown"}
    answer = httpx.post(f"{server.url}/v1/keys", headers=headers, content=b"{")
    assert code(answer) == "invalid_api_key"


def test_of_many_at_once_one_is_done(caller: Caller) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: create_key(caller, "k-1"), range(16)))
    done = [answer for answer in answers if answer.status_code == 201]
    waiting = [answer for answer in answers if answer.status_code != 201]
    assert len({answer.content for answer in done}) == 1
    assert {code(answer) for answer in waiting} <= {"idempotency_in_progress"}
    assert all(answer.headers["x-should-retry"] == "true" for answer in waiting)
    assert names_of_keys(caller).count("ci") == 1


def test_generations_are_not_kept(resident: Caller) -> None:
    body = {"model": "bot", "prompt": "Hi", "max_tokens": 1}
    headers = {"idempotency-key": "k-1"}
    answers = [resident.http.post("/v1/completions", json=body, headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["id"] != answers[1].json()["id"]


def test_no_route_that_changes_something_is_left_out() -> None:
    app = create_app(None)  # type: ignore[arg-type]  # the schema needs no runtime
    paths: dict[str, Any] = app.openapi()["paths"]
    left_out = {
        path
        for path, methods in paths.items()
        for method in methods
        if method in {"post", "put", "patch", "delete"} and not is_concerned(method, path)
    }
    assert left_out <= GENERATIONS | SIGNING_IN
    assert "/v1/chat/completions" in left_out


def test_the_bytes_of_an_upload_are_not_read_as_a_control_body() -> None:
    path = "/v1/uploads/id/content"
    assert is_concerned("put", path, b"application/json")
    assert not is_concerned("put", path, b"application/octet-stream")


def is_concerned(method: str, path: str, content_type: bytes = b"application/json") -> bool:
    headers = [(b"idempotency-key", b"k"), (b"content-type", content_type)]
    return _is_concerned(
        {"type": "http", "method": method.upper(), "path": path, "headers": headers}
    )
