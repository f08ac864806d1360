"""Every route with every kind of caller: exactly the responses of `support/access.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import pytest
from fastapi.dependencies.models import Dependant

from loraplex.api.app import create_app
from loraplex.api.http.auth import authenticate
from loraplex.api.http.openapi import api_routes
from loraplex.api.server.runtime import current_runtime
from loraplex.platform.base import utc_now
from loraplex.platform.keys.models import ApiKey
from loraplex.platform.keys.principal import READING_SCOPES, OperatorRole, Scope, TenantRole
from support.access import MISSING, ROUTES, Access, Kind, concrete
from support.batches import completions, create, jsonl
from support.browser import Browser, signed_in_operator, signed_in_user
from support.envelopes import check_envelope
from support.evaluations import put_set, start
from support.http_uploads import open_upload
from support.published import DOCUMENT
from support.samples import add_sample
from support.server import PATIENCE_SECONDS, Caller, ServerUnderTest
from support.tuning_jobs import create as create_job
from support.tuning_jobs import examples
from support.webhooks import add_webhook

REFUSALS = {
    *("missing_api_key", "invalid_api_key", "tenant_suspended", "tenant_required"),
    *("insufficient_scope", "tenant_not_found"),
}


class Sender(NamedTuple):
    """What a request says of its sender, and what it is told."""

    key: str
    headers: Mapping[str, str]
    expected: Callable[[Access], str | None]
    """The code of the refusal; None if the sender may call."""
    is_signed_in: bool = False


def always(code: str) -> Callable[[Access], str | None]:
    return lambda access: None if access.kind is Kind.OPEN else code


def everywhere(code: str) -> Callable[[Access], str | None]:
    """Also where no key is needed."""
    return lambda access: code


def only_in_tenants(scopes: frozenset[Scope]) -> Callable[[Access], str | None]:
    """A caller within a tenant who has these scopes."""

    def expected(access: Access) -> str | None:
        if access.kind is Kind.SESSION:
            return "session_required"
        if access.kind in {Kind.OPERATOR, Kind.ADMINISTRATOR}:
            return "insufficient_scope"
        is_allowed = access.scope is None or access.scope in scopes
        return None if is_allowed else "insufficient_scope"

    return expected


def only_outside(role: OperatorRole) -> Callable[[Access], str | None]:
    """An operator of this role who acts on no tenant."""

    def expected(access: Access) -> str | None:
        if access.kind is Kind.SESSION:
            return "session_required"
        if access.kind is Kind.TENANT:
            return "tenant_required"
        is_barred = access.kind is Kind.ADMINISTRATOR and role is not OperatorRole.ADMIN
        return "insufficient_scope" if is_barred else None

    return expected


def signed_in(browser: Browser, expected: Callable[[Access], str | None], **more: str) -> Sender:
    """Whoever is signed in there: as with a key, and the routes of sessions besides."""

    def of_session(access: Access) -> str | None:
        return None if access.kind is Kind.SESSION else expected(access)

    return Sender("", {**browser.headers, **more}, of_session, is_signed_in=True)


@pytest.fixture(scope="module")
def senders(server: ServerUnderTest) -> Iterator[dict[str, Sender]]:
    """One of each kind."""
    tenant = server.make_caller("access")
    suspended = server.make_caller("access-suspended")
    admin = server.make_operator("access-admin")
    viewer = server.make_operator("access-viewer", OperatorRole.VIEWER)
    gone = server.make_operator("access-gone")
    with httpx.Client(base_url=server.url, headers=_bearer(admin)) as http:
        http.patch("/admin/tenants/access-suspended", json={"suspended": True}).raise_for_status()
        http.patch("/admin/operators/access-gone", json={"disabled": True}).raise_for_status()
    revoked, expired = _issue(tenant, "revoked"), _issue(tenant, "expired")
    tenant.http.delete(f"/v1/keys/{revoked['id']}").raise_for_status()
    _expire(server, tenant, expired["id"])
    everything = frozenset(Scope)
    on_tenant = {"x-loraplex-tenant": "access"}
    found = {
        "none": Sender("", {}, always("missing_api_key")),
        "empty": Sender("", {"authorization": ""}, always("missing_api_key")),
        "blank": Sender("", {"authorization": "Bearer"}, always("invalid_api_key")),
        "basic": Sender("", {"authorization": "Basic eDp5"}, always("invalid_api_key")),
        "malformed": Sender("lpx_live_short", {}, always("invalid_api_key")),
        "unknown": Sender(_with_other_secret(tenant.key), {}, always("invalid_api_key")),
        "revoked": Sender(revoked["key"], {}, always("invalid_api_key")),
        "expired": Sender(expired["key"], {}, always("invalid_api_key")),
        "disabled operator": Sender(gone, {}, always("invalid_api_key")),
        "suspended": Sender(suspended.key, {}, always("tenant_suspended")),
        "tenant": Sender(tenant.key, {}, only_in_tenants(everything)),
        "tenant with no host": Sender(
            tenant.key, {"host": "a/?x="}, everywhere("malformed_request")
        ),
        "tenant that names itself": Sender(tenant.key, on_tenant, only_in_tenants(everything)),
        "tenant that names another": Sender(
            tenant.key, {"x-loraplex-tenant": "access-suspended"}, always("tenant_not_found")
        ),
        "tenant that names no tenant": Sender(
            tenant.key, {"x-loraplex-tenant": "no-such-tenant"}, always("tenant_not_found")
        ),
        "admin": Sender(admin, {}, only_outside(OperatorRole.ADMIN)),
        "viewer": Sender(viewer, {}, only_outside(OperatorRole.VIEWER)),
        "admin in tenant": Sender(admin, on_tenant, only_in_tenants(OperatorRole.ADMIN.scopes)),
        "viewer in tenant": Sender(viewer, on_tenant, only_in_tenants(READING_SCOPES)),
        "admin in suspended tenant": Sender(
            admin,
            {"x-loraplex-tenant": "access-suspended"},
            only_in_tenants(OperatorRole.ADMIN.scopes),
        ),
        "admin in no such tenant": Sender(
            admin, {"x-loraplex-tenant": "no-such-tenant"}, always("tenant_not_found")
        ),
    }
    for scope in Scope:
        others = everything - {scope}
        caller = server.make_caller(f"access-not-{scope.value.replace(':', '-')}", list(others))
        found[f"without {scope}"] = Sender(caller.key, {}, only_in_tenants(others))
    with ExitStack() as stack:
        for role in TenantRole:
            browser = stack.enter_context(signed_in_user(server, tenant, role))
            found[f"signed-in {role}"] = signed_in(browser, only_in_tenants(role.scopes))
        browser = stack.enter_context(signed_in_operator(server, "access-admin", admin))
        found["signed-in admin"] = signed_in(browser, only_outside(OperatorRole.ADMIN))
        found["signed-in admin in tenant"] = signed_in(
            browser, only_in_tenants(OperatorRole.ADMIN.scopes), **on_tenant
        )
        browser = stack.enter_context(signed_in_user(server, tenant, "owner", name="other"))
        headers = {**browser.headers, "x-loraplex-tenant": "access-suspended"}
        found["session that names another tenant"] = Sender(
            "", headers, always("tenant_not_found"), is_signed_in=True
        )
        yield found


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def _issue(caller: Caller, name: str) -> dict[str, Any]:
    answer = caller.http.post("/v1/keys", json={"name": name, "scopes": list(Scope)})
    assert answer.status_code == 201, answer.text
    issued: dict[str, Any] = answer.json()
    return issued


def _expire(server: ServerUnderTest, caller: Caller, key_id: str) -> None:
    database = server.database
    with database.transaction(caller.tenant_id) as session:
        session.get_one(ApiKey, key_id).expires_at = utc_now() - timedelta(1)
    database.close()


def _with_other_secret(key: str) -> str:
    """A well-formed key of a known id that is not the key."""
    return key[:22] + key[22:].swapcase()


def test_the_table_has_exactly_the_routes_there_are() -> None:
    app = create_app(None)  # type: ignore[arg-type]  # nothing is served
    routes = {f"{method} {route.path}" for route in api_routes(app) for method in route.methods}
    assert routes == set(ROUTES)


def test_callers_are_authenticated_before_anything_else_is_read() -> None:
    app = create_app(None)  # type: ignore[arg-type]  # nothing is served
    for route in api_routes(app):
        (kind,) = {ROUTES[f"{method} {route.path}"].kind for method in route.methods}
        called = [call for call in _order(route.dependant) if call is not current_runtime]
        if kind is not Kind.OPEN:
            assert called[0] is authenticate, route.path


def _order(dependant: Dependant) -> Iterator[Callable[..., Any] | None]:
    """The functions of a route's dependencies in the order in which FastAPI calls them."""
    for each in dependant.dependencies:
        yield from _order(each)
        yield each.call


def test_what_the_document_says_of_access_is_the_table() -> None:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            access = ROUTES[f"{method.upper()} {path}"]
            security = operation["security"]
            match access.kind:
                case Kind.OPEN:
                    assert not security or {} in security
                case Kind.ANY:
                    assert security == [{"tenantKey": []}, {"operatorKey": []}, {"session": []}]
                case Kind.TENANT:
                    also = ["messagesKey"] if path.startswith("/v1/messages") else []
                    ways = ["tenantKey", *also, "operatorKey", "session"]
                    assert security == [{way: [access.scope]} for way in ways]
                case Kind.OPERATOR:
                    roles = ["admin", "viewer"]
                    assert security == [{"operatorKey": roles}, {"session": roles}]
                case Kind.ADMINISTRATOR:
                    assert security == [{"operatorKey": ["admin"]}, {"session": ["admin"]}]
                case Kind.SESSION:
                    assert security == [{"session": []}]


ASK_MESSAGE = {"model": "{model}", "messages": [{"role": "user", "content": "x"}]}
FOREIGN_BODIES = [
    (
        "POST /v1/chat/completions",
        {"model": "{model}", "messages": [{"role": "user", "content": "x"}]},
    ),
    ("POST /v1/completions", {"model": "{model}", "prompt": "x"}),
    ("POST /v1/responses", {"model": "{model}", "input": "x"}),
    (
        "POST /v1/responses",
        {"model": "tiny", "input": "x", "previous_response_id": "{response_id}"},
    ),
    ("POST /v1/messages", {**ASK_MESSAGE, "max_tokens": 1}),
    ("POST /v1/messages/count_tokens", ASK_MESSAGE),
    ("POST /v1/embeddings", {"model": "{model}", "input": "x"}),
    ("POST /v1/classify", {"model": "{model}", "input": "x"}),
    ("POST /v1/score", {"model": "{model}", "text_1": "x", "text_2": "y"}),
    ("POST /v1/rerank", {"model": "{model}", "query": "x", "documents": ["y"]}),
    ("POST /v1/load_lora_adapter", {"lora_name": "{model}"}),
    ("POST /v1/unload_lora_adapter", {"lora_name": "{model}"}),
    ("POST /tokenize", {"model": "{model}", "prompt": "x"}),
    ("POST /detokenize", {"model": "{model}", "tokens": [1]}),
    (
        "POST /v1/fine_tuning/jobs",
        {"model": "tiny", "training_file": "{file_id}", "suffix": "trained"},
    ),
    ("PUT /v1/adapters/{name}/golden-sets/{golden_set}", {"file": "{file_id}"}),
    (
        "POST /v1/adapters/{name}/evaluations",
        {"version": 1, "golden_set": "{golden_set}"},
    ),
    ("POST /v1/keys", {"name": "x", "scopes": ["infer"], "user": "{user_id}"}),
    (
        "PUT /v1/adapters/{name}/aliases/{alias}",
        {"version": 1, "canary": {"version": 2, "percent": 5}},
    ),
    ("GET /v1/adapters/{name}/versions/{number}/files/adapter_model.safetensors", None),
]
"""What is named in a body, and forms of a request that its example does not have."""
OWN_HEADERS = {"x-request-id", "request-id", "date"}
"""Differ between any two answers."""
ENDS_THE_SESSION = {"DELETE /v1/session", "DELETE /v1/sessions"}
"""And with it the tests of those that come behind."""
OWN_NAMES = {"POST /v1/adapters/{name}/uploads"}
"""Makes the caller's own, whatever the name is to others."""


@pytest.fixture(scope="module")
def foreign(server: ServerUnderTest, resident: Caller, adapters: list[Path]) -> dict[str, str]:
    """What another tenant has, for each parameter of a path."""
    user = resident.http.post("/v1/users", json={"email": "foreign@access.example"}).json()
    answer = resident.http.post(
        "/v1/completions", json={"model": "bot", "prompt": "x", "max_tokens": 1}
    )
    batch = create(resident.openai, jsonl(completions("bot", ["x"])))
    job = create_job(resident.openai, examples("slow", 100))
    resident.openai.fine_tuning.jobs.cancel(job.id)
    put_set(resident, [{"id": "a", "prompt": "x", "expected": "y"}])
    resident.http.put("/v1/adapters/bot/aliases/prod/gate", json={"golden_set": "golden"})
    evaluation = start(resident, 1)
    resident.http.post(f"/v1/adapters/bot/evaluations/{evaluation['id']}/cancel")
    stored = resident.openai.responses.create(
        model="bot", input="x", max_output_tokens=1, store=True
    )
    return {
        "name": "bot",
        "response_id": stored.id,
        "webhook_id": add_webhook(server, resident),
        "sample_id": add_sample(resident, "bot"),
        "number": "1",
        "alias": "prod",
        "file": "adapter_config.json",
        "upload_id": open_upload(resident, adapters[1], "unfinished")["id"],
        "file_id": batch.input_file_id,
        "batch_id": batch.id,
        "job_id": job.id,
        "golden_set": "golden",
        "evaluation_id": evaluation["id"],
        "model": "resident/bot",
        "key_id": _issue(resident, "foreign")["id"],
        "user_id": user["id"],
        "request_id": answer.headers["x-request-id"],
        "period": "month",
    }


def like_it(value: str) -> str:
    """Something of the same form that nobody has."""
    return value if value.isdigit() or "." in value else value.translate(_OTHERS)


_OTHERS = str.maketrans("abcdef0123456789", "badcfe1032547698")

FOREIGN_REQUESTS = [
    *(
        (route, None)
        for route, access in ROUTES.items()
        if access.kind is Kind.TENANT and "{" in route and route not in OWN_NAMES
    ),
    *FOREIGN_BODIES,
]


@pytest.fixture(scope="module", params=["key", "session"])
def stranger(request: pytest.FixtureRequest, server: ServerUnderTest) -> Iterator[httpx.Client]:
    """Another tenant's caller, who may do everything there: by a key, or signed in."""
    caller = server.make_caller(f"access-stranger-{request.param}")
    if request.param == "key":
        yield caller.http
        return
    with signed_in_user(server, caller, "owner") as browser:
        browser.confirm()
        yield browser.http


LISTS = [
    route
    for route, access in ROUTES.items()
    if access.kind is Kind.TENANT and route.startswith("GET ") and "{" not in route
]


@pytest.mark.parametrize("route", LISTS)
def test_no_list_has_what_is_anothers(
    route: str, stranger: httpx.Client, foreign: dict[str, str]
) -> None:
    answer = stranger.get(route.removeprefix("GET "))
    assert answer.is_success, answer.text
    names = ("upload_id", "file_id", "batch_id", "response_id", "key_id", "user_id", "request_id")
    for name in (*names, "job_id", "webhook_id", "sample_id", "model"):
        assert foreign[name] not in answer.text


@pytest.mark.parametrize(("route", "body"), FOREIGN_REQUESTS)
def test_what_is_anothers_answers_byte_for_byte_like_what_is_not_there(
    route: str, body: dict[str, Any] | None, stranger: httpx.Client, foreign: dict[str, str]
) -> None:
    method, path = route.split(" ", 1)
    operation = DOCUMENT["paths"].get(path, {}).get(method.lower(), {})

    def ask(values: Mapping[str, str]) -> tuple[int, str, dict[str, str]]:
        quoted = {name: quote(value, safe="") for name, value in values.items()}
        answer = stranger.request(
            method, concrete(path, quoted), **content_of(operation, body, values)
        )
        assert answer.status_code == 404, answer.text
        text = answer.text
        named = [value for value in values.values() if not value.isdigit()]
        for value in sorted([answer.headers["x-request-id"], *named], key=len, reverse=True):
            text = text.replace(value, "#")
        headers = {k: v for k, v in answer.headers.items() if k not in OWN_HEADERS}
        return answer.status_code, text, headers

    assert ask(foreign) == ask({name: like_it(value) for name, value in foreign.items()})


def content_of(
    operation: dict[str, Any], body: dict[str, Any] | None, values: Mapping[str, str]
) -> dict[str, Any]:
    """A body that the route takes, which names what `values` say."""
    if body is not None:
        return {
            "json": {k: v.format(**values) if isinstance(v, str) else v for k, v in body.items()}
        }
    content = operation.get("requestBody", {}).get("content", {})
    if "application/octet-stream" in content:
        octets = {"content-type": "application/octet-stream"}
        return {"content": b"", "params": {"offset": 0}, "headers": octets}
    if not content:
        return {}
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    return {"json": DOCUMENT["components"]["schemas"][name]["examples"][0]}


@pytest.mark.parametrize("route", ROUTES)
def test_a_route_answers_each_kind_of_caller_as_documented(
    route: str, server: ServerUnderTest, senders: dict[str, Sender]
) -> None:
    method, path = route.split(" ", 1)
    with httpx.Client(base_url=server.url, timeout=PATIENCE_SECONDS) as http:
        for kind, sender in senders.items():
            if sender.is_signed_in and route in ENDS_THE_SESSION:
                continue
            expected = sender.expected(ROUTES[route])
            body = b"{" if expected else b"{}"  # nobody reads what is refused
            answer = http.request(
                method,
                concrete(path, MISSING),
                headers={
                    "content-type": "application/json",
                    **_bearer(sender.key),
                    **sender.headers,
                },
                content=body if method in {"POST", "PUT", "PATCH"} else None,
            )
            if expected is not None:
                check_envelope(answer, expected)
                is_keyless = expected in {"missing_api_key", "invalid_api_key"}
                assert answer.headers.get("www-authenticate") == ("Bearer" if is_keyless else None)
                continue
            code = None if answer.is_success else answer.json()["error"]["code"]
            missing = "slug" in path and code == "tenant_not_found"
            assert missing or code not in REFUSALS, (kind, answer.text)
            assert answer.status_code < 500, (kind, answer.text)
