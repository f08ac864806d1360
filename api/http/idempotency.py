"""`Idempotency-Key` on every changing request, as in Stripe's API.

It is a middleware outside of the routes, so no route can omit it: a POST, PUT, PATCH or DELETE that
is repeated with the same key gets the first response. Only successful responses are stored; a
refused client may correct the request or repeat it. Generation requests are excluded, because they
change nothing, and so are the bytes of uploads, whose offset has the same effect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...platform.errors import PlatformError
from ...platform.idempotency.models import MAX_IDEMPOTENCY_KEY_LENGTH
from ...platform.idempotency.service import IdempotentAnswers, KeyedRequest, hold
from ...platform.sessions import PlatformSession
from ..contract.errors import ApiError
from ..server.runtime import Runtime
from .auth import authenticate, credential_id
from .bodies import CONTROL_BODY_BYTES, read_body
from .error_responses import answer_error

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

HEADER = "idempotency-key"
IDEMPOTENCY_ERRORS = (
    "invalid_parameter",
    "idempotency_conflict",
    "idempotency_in_progress",
    "idempotent_answer_lost",
)
_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_PREFIXES = ("/v1/", "/admin/")
_GENERATION = (
    "/v1/chat/",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/classify",
    "/v1/score",
    "/v1/rerank",
    "/v1/tokenize",
    "/v1/detokenize",
)
_SIGNING = "/v1/session"
"""Signing in and out: cookies are never kept."""
_UPLOADS = (b"application/octet-stream", b"multipart/form-data")
_KEPT_HEADERS = frozenset({b"content-type", b"etag", b"location"})


class KeptAnswer(msgspec.Struct):
    """The stored parts of a response besides its status."""

    headers: list[tuple[bytes, bytes]]
    body: bytes


class IdempotentRequests:
    """The middleware; it runs inside the one that assigns request ids."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_concerned(scope):
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            keyed, body = await _read(request)
        except (ApiError, PlatformError) as exc:
            await answer_error(request, exc)(scope, receive, send)
            return
        runtime: Runtime = request.app.state.runtime
        with runtime.idempotent_answers.running(keyed):
            await self._answer(request, keyed, body, send)

    async def _answer(self, request: Request, keyed: KeyedRequest, body: bytes, send: Send) -> None:
        try:
            kept = await _change(request, lambda answers, session: answers.begin(session, keyed))
        except PlatformError as exc:
            response = answer_error(request, exc)
            await response(request.scope, request.receive, send)
            return
        if kept is not None:
            await _replay(*kept)(request.scope, request.receive, send)
            return
        await self._run_once(request, keyed, body, send)

    async def _run_once(
        self, request: Request, keyed: KeyedRequest, body: bytes, send: Send
    ) -> None:
        recorder = _Recorder(send)
        request.state.guard = partial(hold, request=keyed)
        try:
            await self.app(request.scope, _again(body, request.receive), recorder)
        finally:
            await _settle(request, keyed, recorder)
            await recorder.release()


class _Recorder:
    """Holds an answer back until it is kept."""

    def __init__(self, send: Send) -> None:
        self.status = 0
        self.answer = KeptAnswer([], b"")
        self._send = send
        self._messages: list[Message] = []

    async def __call__(self, message: Message) -> None:
        self._messages.append(message)
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.answer.headers = [
                (name, value) for name, value in message["headers"] if name in _KEPT_HEADERS
            ]
        else:
            self.answer.body += message.get("body", b"")

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    async def release(self) -> None:
        for message in self._messages:
            await self._send(message)


def is_repeatable(method: str, path: str) -> bool:
    """Whether requests like this take an `Idempotency-Key`."""
    if path.startswith(_SIGNING) or (method == "POST" and path.startswith(_GENERATION)):
        return False
    return method in _METHODS and path.startswith(_PREFIXES)


def _is_concerned(scope: Scope) -> bool:
    if scope["type"] != "http" or not is_repeatable(scope["method"], scope["path"]):
        return False
    headers = dict(scope["headers"])
    is_upload = headers.get(b"content-type", b"").startswith(_UPLOADS)
    return HEADER.encode() in headers and not is_upload


async def _read(request: Request) -> tuple[KeyedRequest, bytes]:
    """The request under its key, and its body. Raises ApiError or a PlatformError."""
    runtime: Runtime = request.app.state.runtime
    await authenticate(request)
    key = request.headers[HEADER]
    if not _is_key(key):
        raise ApiError(
            "invalid_parameter",
            f"Idempotency-Key: 1 to {MAX_IDEMPOTENCY_KEY_LENGTH} visible ASCII characters.",
            param="Idempotency-Key",
        )
    body = await read_body(request, CONTROL_BODY_BYTES)
    what = (
        request.method,
        request.scope["raw_path"].decode("latin-1"),
        request.scope["query_string"].decode("latin-1"),
        str(request.state._state.get("tenant_id")),
        request.headers.get("if-match", ""),
    )
    digest = hashlib.sha256("\0".join(what).encode() + b"\0" + body).digest()
    keyed = KeyedRequest(
        owner=credential_id(request, runtime.settings.trusted_proxies),
        key=key,
        request_hash=digest,
        request_id=request.state.request_id,
    )
    return keyed, body


def _is_key(text: str) -> bool:
    return 1 <= len(text) <= MAX_IDEMPOTENCY_KEY_LENGTH and all("!" <= each <= "~" for each in text)


def _again(body: bytes, receive: Receive) -> Receive:
    """Replay the body, then continue with `receive`."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return pending.pop() if pending else await receive()

    return receive_again


def _replay(status: int, answer: bytes) -> Response:
    kept = msgspec.msgpack.decode(answer, type=KeptAnswer)
    response = Response(kept.body, status)
    response.raw_headers = [
        (name, value) for name, value in response.raw_headers if name == b"content-length"
    ]
    response.raw_headers += [*kept.headers, (b"idempotent-replayed", b"true")]
    return response


async def _settle(request: Request, keyed: KeyedRequest, recorder: _Recorder) -> None:
    """Keep an answer of success; after any other end the key may be used again."""

    def settle(answers: IdempotentAnswers, session: PlatformSession) -> None:
        if recorder.is_success:
            answer = msgspec.msgpack.encode(recorder.answer)
            answers.finish(session, keyed, recorder.status, answer)
        else:
            answers.give_up(session, keyed)

    try:
        await _change(request, settle)
    except PlatformError as exc:  # a repetition of the request settles it
        log.warning("answer_not_kept", error=str(exc), request_id=keyed.request_id)


async def _change(
    request: Request, change: Callable[[IdempotentAnswers, PlatformSession], Result]
) -> Result:
    runtime: Runtime = request.app.state.runtime
    answers = runtime.idempotent_answers
    return await runtime.control_plane.write_all_tenants(lambda session: change(answers, session))
