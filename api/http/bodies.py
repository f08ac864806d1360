"""Reads request bodies: after authentication, up to the route's limit, JSON only.

FastAPI itself reads a declared body before it runs any dependency. These are dependencies, so
authentication runs first and the body of an unauthenticated request is never read.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import msgspec
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from ...adapters.wiping import wipe
from ..contract.errors import ApiError
from ..contract.promises import terms
from ..contract.request_model import RequestModel

CONTROL_BODY_BYTES = 1 << 20
INFERENCE_BODY_BYTES = 4 << 20

JSON_ERRORS = (
    "invalid_json",
    "invalid_parameter",
    "unsupported_parameter",
    "body_too_large",
    "unsupported_media_type",
    "request_timeout",
)
"""The errors of reading a JSON body."""
SILENCE_SECONDS = 30.0
"""A client that sends nothing of its body for this long is disconnected."""
WHOLE_BODY_SECONDS = 60.0
"""A JSON body has to be here by then."""

MAX_CONTAINERS = 100_000
"""Arrays and objects of a body: millions of them fit in 4 MiB, and take seconds to parse."""
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)

Model = TypeVar("Model", bound=RequestModel)


class _NamesModel(msgspec.Struct):
    """A body that is refused, as far as the log of requests is concerned."""

    model: str | None = None


def _model_in(body: bytes) -> str | None:
    """Which model a body names that may be malformed."""
    with suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
        return msgspec.json.decode(body, type=_NamesModel).model
    return None


def json_body(
    model: type[Model], max_bytes: int = CONTROL_BODY_BYTES
) -> Callable[[Request], Awaitable[Model]]:
    """A dependency that yields the request's JSON body as `model`.

    It raises ApiError or pydantic's ValidationError.
    """

    names_model = "model" in model.model_fields

    @terms(errors=JSON_ERRORS, body=model)
    async def read_model(request: Request) -> Model:
        check_encoding(request, "application/json")
        body = await read_body(request, max_bytes)
        check_containers(body)
        try:
            parsed = model.model_validate_json(body)
        except ValidationError:
            if names_model:
                request.state.measures.asked_model = _model_in(body)
            raise
        if names_model:
            request.state.measures.asked_model = parsed.model  # type: ignore[attr-defined]
        return parsed

    return read_model


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body; raises ApiError as soon as it exceeds `max_bytes` or a time limit."""
    if (declared_bytes(request) or 0) > max_bytes:
        raise _too_large(max_bytes)
    now = asyncio.get_running_loop().time
    ends_at = now() + WHOLE_BODY_SECONDS
    body = bytearray()
    try:
        # One timer for both limits: most bodies arrive in one piece, and timers cost time.
        async with asyncio.timeout_at(min(now() + SILENCE_SECONDS, ends_at)) as patience:
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
                if not message.get("more_body", False):
                    return bytes(body)
                patience.reschedule(min(now() + SILENCE_SECONDS, ends_at))
    except TimeoutError:
        raise ApiError("request_timeout") from None


def declared_bytes(request: Request) -> int | None:
    """The declared length of the body, if there is one."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isdecimal() else None


async def body_chunks(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    """The body as it arrives. A chunk is zeroed when the next one is requested, or the iteration
    ends.

    Raises ApiError after more than `max_bytes`, or after nothing for SILENCE_SECONDS.
    """
    num_bytes = 0
    arriving = aiter(request.stream())
    while (chunk := await _next_chunk(arriving)) is not None:
        try:
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            yield chunk
        finally:
            wipe(chunk)


async def _next_chunk(arriving: AsyncIterator[bytes]) -> bytes | None:
    try:
        async with asyncio.timeout(SILENCE_SECONDS):
            return await anext(arriving, None)
    except TimeoutError:
        raise ApiError("request_timeout") from None


def check_encoding(request: Request, media_type: str) -> None:
    """Raises ApiError unless the body is `media_type`, uncompressed."""
    sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if sent != media_type:
        raise ApiError("unsupported_media_type", f"The content type must be {media_type}.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError("unsupported_media_type", "Compressed bodies are not supported.")


def check_containers(body: bytes) -> None:
    """Raises ApiError if the JSON text holds more arrays and objects than MAX_CONTAINERS."""
    if _num_brackets(body) > MAX_CONTAINERS < _num_brackets(_STRINGS.sub(b"", body)):
        raise ApiError(
            "body_too_large", f"The body contains more than {MAX_CONTAINERS} arrays and objects."
        )


def _num_brackets(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError("body_too_large", f"The body exceeds {max_bytes} bytes.")
