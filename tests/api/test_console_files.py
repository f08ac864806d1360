"""The served console pages, and the headers of every response."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.api.http.console_files import ConsoleFiles
from support.console_policy import POLICY
from support.server import PATIENCE_SECONDS, ServerUnderTest

PAGE = b"<!doctype html><title>console</title>"
SCRIPT = b"console.log(1);" * 100


class WithRequestId:
    """What the application's outermost layer gives each request."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["request_id"] = "req-1"
        await self.app(scope, receive, send)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A console of two files, and a file beside it that is none of its."""
    folder = tmp_path_factory.mktemp("static") / "console"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_bytes(PAGE)
    (folder / "assets" / "main-abc123.js").write_bytes(SCRIPT)
    (folder.parent / "secret").write_text("secret")
    app = Starlette(routes=ConsoleFiles(folder).routes, middleware=[Middleware(WithRequestId)])
    with TestClient(app) as client:
        yield client


@pytest.mark.parametrize("path", ["", "adapters/acme/bot", "join", "no/such/page", "index.html"])
def test_every_page_is_the_one_that_finds_its_own_way(path: str, client: TestClient) -> None:
    answer = client.get(f"/console/{path}")
    assert answer.content == PAGE
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["cache-control"] == "no-store"
    said = [part.strip().partition(" ") for part in _policy(answer.headers).split(";")]
    assert {name: value for name, _, value in said} == POLICY


def _policy(headers: Mapping[str, str]) -> str:
    return headers["content-security-policy"]


def test_assets_never_change_and_come_compressed(client: TestClient) -> None:
    path = "/console/assets/main-abc123.js"
    answer = client.get(path, headers={"accept-encoding": "gzip"})
    assert answer.content == SCRIPT
    assert answer.headers["content-encoding"] == "gzip"
    assert int(answer.headers["content-length"]) == len(gzip.compress(SCRIPT, mtime=0))
    assert "immutable" in answer.headers["cache-control"]
    assert answer.headers["content-type"].startswith(("text/javascript", "application/javascript"))
    plain = client.get(path, headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == SCRIPT


@pytest.mark.parametrize(
    "path", ["assets/other.js", "assets/../../secret", "assets/%2e%2e/%2e%2e/secret"]
)
def test_what_is_no_asset_is_not_found(path: str, client: TestClient) -> None:
    answer = client.get(f"/console/{path}")
    assert b"secret" not in answer.content
    assert answer.status_code == 404 or answer.content == PAGE


def test_nothing_beside_the_bundle_is_served(client: TestClient) -> None:
    for path in ("../secret", "..%2fsecret", "%2e%2e/secret", "/etc/passwd"):
        assert client.get(f"/console/{path}").content in (PAGE, b"Not Found")


def test_browsers_are_led_to_the_console_and_others_are_not(client: TestClient) -> None:
    for path in ("/", "/console"):
        answer = client.get(path, headers={"accept": "text/html"}, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (307, "/console/")
        assert client.get(path, headers={"accept": "*/*"}).status_code == 404


def test_a_page_changes_nothing(client: TestClient) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        assert client.request(method, "/console/").status_code == 405


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/console/"),
        ("GET", "/console/adapters"),
        ("GET", "/console/assets/none.js"),
        ("POST", "/console/"),
        ("GET", "/health"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("GET", "/v1/session"),
        ("POST", "/v1/session"),
        ("GET", "/v1/models"),
        ("GET", "/admin/tenants"),
        ("GET", "/no/such/path"),
    ],
)
def test_every_answer_says_what_a_browser_may_do_with_it(
    method: str, path: str, server: ServerUnderTest
) -> None:
    headers = {"accept": "text/html"}
    answer = httpx.request(method, server.url + path, headers=headers, timeout=PATIENCE_SECONDS)
    assert "default-src 'none'" in _policy(answer.headers)
    assert "frame-ancestors 'none'" in _policy(answer.headers)
    assert "unsafe" not in _policy(answer.headers)
    assert len(answer.headers.get_list("content-security-policy")) == 1
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"
