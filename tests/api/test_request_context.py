"""The outermost layer: ids, headers, the request log, and uncaught errors."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.testing import capture_logs

from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.http.request_context import RequestContext
from loraplex.api.server.readiness import Readiness
from loraplex.api.telemetry.canary_watch import CanaryWatch
from loraplex.api.telemetry.metrics import Metrics
from loraplex.engine.process.client import EngineClient


class Exchange:
    """One request through the middleware around `app`."""

    def __init__(
        self, app: ASGIApp, *, path: str = "/v1/secret-path", is_draining: bool = False
    ) -> None:
        self.sent: list[Message] = []
        self.metrics = Metrics(lambda: None)
        self.readiness = Readiness(cast(EngineClient, None))
        self.readiness.is_draining = is_draining
        settings = SimpleNamespace(allowed_hosts=None, trusted_proxies=())
        runtime = SimpleNamespace(
            metrics=self.metrics,
            readiness=self.readiness,
            tracing=None,
            request_log=None,
            refusals=None,
            overview=None,
            canary_watch=CanaryWatch(cast(ControlPlane, None), self.metrics),
            settings=settings,
        )
        state = SimpleNamespace(runtime=runtime)
        self.scope: dict[str, Any] = {
            "type": "http",
            "scheme": "http",
            "method": "GET",
            "path": path,
            "query_string": b"key=secret-query",
            "headers": [(b"x-request-id", b"callers-own")],
            "app": SimpleNamespace(state=state),
            "route": SimpleNamespace(path="/v1/{name}"),
        }
        with capture_logs() as self.logs:
            try:
                asyncio.run(RequestContext(app)(self.scope, self._receive, self._send))
                self.error: Exception | None = None
            except Exception as exc:
                self.error = exc

    async def _receive(self) -> Message:
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


async def fail(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError("a secret detail")


async def fail_on_the_way(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise RuntimeError("a secret detail")


async def lose_the_caller(scope: Scope, receive: Receive, send: Send) -> None:
    raise ClientDisconnect


def test_every_answer_has_an_id_of_the_servers_and_safe_headers() -> None:
    first, second = Exchange(answer), Exchange(answer)
    assert first.headers[b"x-request-id"].startswith(b"req-")
    assert first.headers[b"x-request-id"] != second.headers[b"x-request-id"]
    assert first.headers[b"x-content-type-options"] == b"nosniff"
    assert first.headers[b"cache-control"] == b"no-store"
    assert b"frame-ancestors 'none'" in first.headers[b"content-security-policy"]


def test_the_log_line_has_facts_and_no_text_of_the_callers() -> None:
    (line,) = Exchange(answer).logs
    assert line["event"] == "request_finished"
    assert (line["method"], line["route"], line["status"]) == ("GET", "/v1/{name}", 200)
    assert "secret" not in str(line)
    assert "callers-own" not in str(line)


def test_what_nobody_caught_is_a_coded_error_without_details() -> None:
    exchange = Exchange(fail)
    assert exchange.error is None
    assert exchange.sent[0]["status"] == 500
    assert b'"code":"internal_error"' in exchange.body
    assert b"secret" not in exchange.body
    assert [line["event"] for line in exchange.logs] == [
        "request_failed_unexpectedly",
        "request_finished",
    ]
    assert exchange.logs[1]["code"] == "internal_error"


def test_an_answer_that_has_begun_is_broken_off() -> None:
    exchange = Exchange(fail_on_the_way)
    assert isinstance(exchange.error, RuntimeError)
    assert len(exchange.sent) == 1


def test_a_caller_that_left_is_no_failure() -> None:
    exchange = Exchange(lose_the_caller)
    assert exchange.error is None
    assert exchange.sent == []
    assert [line["code"] for line in exchange.logs] == ["client_disconnected"]


def test_requests_are_counted_by_route_and_code() -> None:
    exchange = Exchange(fail)
    text = exchange.metrics.render().decode()
    labels = 'code="internal_error",method="GET",route="/v1/{name}",status="500"'
    assert f"loraplex_http_requests_total{{{labels}}} 1.0" in text
    assert "secret" not in text


def test_a_draining_server_refuses_the_api_and_closes_the_connection() -> None:
    exchange = Exchange(answer, is_draining=True)
    assert exchange.sent[0]["status"] == 503
    assert exchange.headers[b"connection"] == b"close"
    assert exchange.headers[b"retry-after"] == b"1"
    assert b'"code":"shutting_down"' in exchange.body


def test_a_draining_server_still_answers_who_watches_it() -> None:
    exchange = Exchange(answer, path="/health", is_draining=True)
    assert exchange.sent[0]["status"] == 200
    assert b"connection" not in exchange.headers


def test_requests_of_the_api_count_until_they_are_answered() -> None:
    counts: list[int] = []

    async def count(scope: Scope, receive: Receive, send: Send) -> None:
        counts.append(scope["app"].state.runtime.readiness.num_requests)
        await answer(scope, receive, send)

    for path in ("/v1/models", "/ready"):
        assert Exchange(count, path=path).readiness.num_requests == 0
    assert Exchange(fail).readiness.num_requests == 0
    assert counts == [1, 0]
