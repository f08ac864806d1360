"""The outermost layer of every request: id, log line, counters, and the final error handler.

It is plain ASGI: a middleware that wraps the response body would swallow an error in a stream, and
a truncated answer would look complete.
"""

from __future__ import annotations

import secrets
import string
import time
from collections.abc import Mapping

import structlog
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...platform.audit.event import Party
from ...platform.keys.principal import AnyPrincipal
from ..contract.errors import ApiError
from ..contract.message_errors import is_messages_path
from ..control_plane.refusals import REFUSALS, Refusals, party_of
from ..inference.held_charge import HeldCharge
from ..server.readiness import Readiness
from ..telemetry.canary_watch import CanaryWatch
from ..telemetry.metrics import Metrics
from ..telemetry.overview import Overview
from ..telemetry.request_log import GENERATING_ROUTES, RequestLog
from ..telemetry.request_measures import CLIENT_DISCONNECTED, RequestMeasures
from ..telemetry.tracing import EndedRequest, Tracing
from .batch_lines import line_of
from .browser import STRICT_TRANSPORT, is_over_tls
from .disconnects import ClientDisconnected
from .error_responses import error_response
from .hosts import is_allowed, parse_hosts
from .limit_headers import limit_headers
from .peer_address import peer_address

log = structlog.get_logger(__name__)

_SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
_NOTHING_RUNS = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")
"""For every response that does not set its own policy, as the console's pages do."""
_API_PREFIXES = ("/v1/", "/admin/", "/tokenize", "/detokenize")
_NO_STORE = (b"cache-control", b"no-store")
_STRICT_TRANSPORT = (b"strict-transport-security", STRICT_TRANSPORT.encode())
MAX_CALLERS_ID_LENGTH = 128
_CALLERS_ID_CHARACTERS = frozenset(string.ascii_letters + string.digits + "._-")


def split_key(request: Request) -> str:
    """The id that determines the side of an alias with a canary: the client's `X-Request-Id`.

    The server's id if the client sends no valid one (1 to 128 letters, digits, '.', '_' and '-').
    The client's id has no other use: the log and the ledger always have the server's.
    """
    sent = request.headers.get("x-request-id", "")
    is_key = len(sent) <= MAX_CALLERS_ID_LENGTH and _CALLERS_ID_CHARACTERS.issuperset(sent)
    ours: str = request.state.request_id
    return sent if sent and is_key else ours


def held_charge(request: Request) -> HeldCharge | None:
    """Where the charge of a line of a batch waits for its result; None for other requests."""
    line = line_of(request)
    return None if line is None else line.held


class RequestContext:
    """Assigns each request an id of the server, never the client's, and handles uncaught errors."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        await _ObservedRequest(self.app, scope, receive, send).run()


class _ObservedRequest:
    def __init__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        self.app = app
        self.scope = scope
        self.receive = receive
        runtime = scope["app"].state.runtime
        self.metrics: Metrics = runtime.metrics
        self.request_log: RequestLog = runtime.request_log
        self.canary_watch: CanaryWatch = runtime.canary_watch
        self.overview: Overview = runtime.overview
        self.refusals: Refusals = runtime.refusals
        self.tracing: Tracing | None = runtime.tracing
        self.readiness: Readiness = runtime.readiness
        self.hosts = parse_hosts(runtime.settings.allowed_hosts)
        self.trusted_proxies = runtime.settings.trusted_proxies
        self.downstream_send = send
        self.started_at = time.monotonic()
        self.status = 0
        self.state = scope.setdefault("state", {})
        self.state["send_body"] = send
        self.state["request_id"] = f"req-{secrets.token_hex(12)}"
        self.state["started_at"] = self.started_at
        self.measures = self.state["measures"] = RequestMeasures()

    async def run(self) -> None:
        is_api = self.scope["path"].startswith(_API_PREFIXES)
        refusal = self.refusal() if is_api else None
        is_counted = is_api and refusal is None
        self.readiness.num_requests += is_counted
        try:
            if refusal is None:
                await self.app(self.scope, self.receive, self.send)
            else:
                await self.answer(refusal, connection="close")
        except (ClientDisconnect, ClientDisconnected):
            self.state["error_code"] = CLIENT_DISCONNECTED  # there is no client left to respond to
        except Exception:  # a response that has not started becomes a coded error
            log.exception("request_failed_unexpectedly", request_id=self.state["request_id"])
            if self.status:
                raise  # Started: only a broken connection shows that it is incomplete.
            await self.answer(ApiError("internal_error"))
        finally:
            self.readiness.num_requests -= is_counted
            del self.state["send_body"]  # it has the scope, which has this
            self.observe()

    def refusal(self) -> ApiError | None:
        """Why no route is to see the request."""
        is_ours = line_of(Request(self.scope)) is not None
        if not is_ours and not is_allowed(Headers(scope=self.scope), self.hosts):
            return ApiError("host_not_allowed")
        return self.readiness.refusal

    async def answer(self, error: ApiError, **headers: str) -> None:
        response = error_response(Request(self.scope, self.receive), error)
        response.headers.update(headers)
        await response(self.scope, self.receive, self.send)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", []))
            request_id = self.state["request_id"].encode()
            headers += [(b"x-request-id", request_id), *_SECURITY_HEADERS]
            if is_messages_path(self.scope["path"]):
                headers.append((b"request-id", request_id))  # where Anthropic's clients look
            if standing := self.measures.standing:
                headers += [(k.encode(), v.encode()) for k, v in limit_headers(standing).items()]
            said = {name for name, _ in headers}
            headers += [each for each in (_NO_STORE, _NOTHING_RUNS) if each[0] not in said]
            if is_over_tls(Request(self.scope), self.trusted_proxies):
                headers.append(_STRICT_TRANSPORT)
            message = {**message, "headers": headers}
        await self.downstream_send(message)

    def observe(self) -> None:
        route = getattr(self.scope.get("route"), "path", "unmatched")
        method = self.scope["method"] if route != "unmatched" else "any"
        code = self.state.get("error_code", "")
        seconds = time.monotonic() - self.started_at
        self.metrics.http.observe(
            method=method, route=route, status=self.status, code=code, seconds=seconds
        )
        if tenant_id := self.state.get("tenant_id"):
            if route in GENERATING_ROUTES:
                self.overview.observe_request(
                    tenant_id, code=code, seconds=seconds, measures=self.measures
                )
            self.canary_watch.add(code, self.measures)
            self.request_log.add(
                request_id=self.state["request_id"],
                tenant_id=tenant_id,
                key_id=self.state.get("key_id"),
                route=route,
                status=self.status,
                code=code,
                seconds=seconds,
                measures=self.measures,
            )
        if code in REFUSALS:
            self.note_refusal(method, route, code)
        log.info(
            "request_finished",
            request_id=self.state["request_id"],
            tenant_id=self.state.get("tenant_id"),
            method=method,
            route=route,
            status=self.status,
            code=code or None,
            seconds=round(seconds, 6),
            **_rounded(self.measures.figures()),
        )
        if self.tracing and route.startswith(_API_PREFIXES):
            self.tracing.record(
                EndedRequest(
                    request_id=self.state["request_id"],
                    tenant_id=self.state.get("tenant_id"),
                    method=method,
                    route=route,
                    status=self.status,
                    code=code,
                    seconds=seconds,
                    headers=Headers(scope=self.scope),
                    measures=self.measures,
                )
            )

    def note_refusal(self, method: str, route: str, code: str) -> None:
        caller: AnyPrincipal | None = self.state.get("caller")
        party: Party | None = self.state.get("refused")
        if party is None and caller is not None:
            party = party_of(caller)
        if party is None:
            return  # neither an existing key nor a named account
        address = peer_address(Request(self.scope), self.trusted_proxies)
        self.refusals.add(
            party,
            code=code,
            resource=f"{method} {route}",
            request_id=self.state["request_id"],
            address=None if address is None else str(address),
        )


def _rounded(figures: Mapping[str, str | int | float]) -> dict[str, object]:
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in figures.items()
    }
