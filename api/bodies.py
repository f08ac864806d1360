"""Reading request bodies: after authentication, never more than the route's limit, JSON only.

FastAPI itself reads a declared body before it runs any dependency. These are dependencies, so the
router's authentication comes first and an anonymous body is never read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request

from .errors import ApiError
from .schemas.request_model import RequestModel

CONTROL_BODY_BYTES = 1 << 20
INFERENCE_BODY_BYTES = 4 << 20

Model = TypeVar("Model", bound=RequestModel)


def json_body(
    model: type[Model], max_bytes: int = CONTROL_BODY_BYTES
) -> Callable[[Request], Awaitable[Model]]:
    """A dependency that yields the request's JSON body as `model`.

    It raises ApiError or pydantic's ValidationError.
    """

    async def read_model(request: Request) -> Model:
        check_encoding(request, "application/json")
        return model.model_validate_json(await read_body(request, max_bytes))

    return read_model


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body; raises ApiError as soon as it is known to exceed `max_bytes`."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    chunks = bytearray()
    async for chunk in body_chunks(request, max_bytes):
        chunks += chunk
    return bytes(chunks)


async def body_chunks(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    """The body as it arrives; raises ApiError once more than `max_bytes` came."""
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        yield chunk


def check_encoding(request: Request, media_type: str) -> None:
    """Raises ApiError unless the body is `media_type`, uncompressed."""
    sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if sent != media_type:
        raise ApiError("unsupported_media_type", f"The content type must be {media_type}.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError("unsupported_media_type", "Compressed bodies are not read.")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError("body_too_large", f"The body exceeds {max_bytes} bytes.")
