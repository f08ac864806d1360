"""Converts errors to HTTP responses.

`x-should-retry` tells the official clients whether to retry.
"""

from __future__ import annotations

import math

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ...adapters.errors import AdapterError, StorageFull
from ...engine.errors import EngineError, EngineRestarted, EngineUnavailable
from ...platform.errors import DiskShareExceeded, PlatformError
from ..contract.errors import ApiError, as_api_error, from_validation
from ..contract.message_errors import encode_error_of

DEFAULT_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 30.0
FULL_DISK_RETRY_SECONDS = 60.0
"""Space is freed when others finish, abandon or delete uploads."""
_ENGINE_DOWN_CODES = frozenset({EngineUnavailable.code, EngineRestarted.code})
_FULL_DISK_CODES = frozenset({StorageFull.code, DiskShareExceeded.code})
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


def error_response(request: Request, error: ApiError) -> Response:
    """The answer for `error`; the code is also left for the request log and the metrics."""
    request.state.error_code = error.code
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if error.retryable:
        seconds = error.retry_after_seconds or _retry_seconds(request, error.code)
        headers["retry-after-ms"] = str(math.ceil(seconds * 1000))
        headers["retry-after"] = str(math.ceil(seconds))
    if error.published.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(
        encode_error_of(request.scope["path"], error, request.state.request_id),
        status_code=error.published.status,
        headers=headers,
        media_type="application/json",
    )


def _retry_seconds(request: Request, code: str) -> float:
    """Until it is worth asking again: an engine that is down needs as long as its last start."""
    if code in _FULL_DISK_CODES:
        return FULL_DISK_RETRY_SECONDS
    if code not in _ENGINE_DOWN_CODES:
        return DEFAULT_RETRY_SECONDS
    start_seconds: float | None = request.app.state.runtime.engine.start_seconds
    return min(max(start_seconds or 0.0, DEFAULT_RETRY_SECONDS), MAX_RETRY_SECONDS)


def answer_error(request: Request, error: Exception) -> Response:
    """The response for any layer's error; the refused party is recorded for the audit log."""
    request.state.refused = getattr(error, "refused", None)
    return error_response(request, _published_error(error))


def install_error_handlers(app: FastAPI) -> None:
    """Answer every expected error with the envelope; the unexpected is the middleware's."""

    async def answer(request: Request, error: Exception) -> Response:
        return answer_error(request, error)

    async def answer_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        published = _published_error(error)
        if published.code == "not_found":
            published = _explain_missing_path(request, published)
        response = error_response(request, published)
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(HTTPException, answer_http)
    for expected in (
        ApiError,
        ValidationError,
        RequestValidationError,
        EngineError,
        AdapterError,
        PlatformError,
    ):
        app.add_exception_handler(expected, answer)


def _published_error(error: Exception) -> ApiError:
    match error:
        case RequestValidationError():
            return from_validation(error.errors(), num_skipped=1)
        case HTTPException() if error.status_code in _HTTP_CODES:
            return ApiError(_HTTP_CODES[error.status_code])
        case _:
            return as_api_error(error)


_WITHOUT_PREFIX = (*("/chat/", "/completions", "/embeddings", "/models", "/responses"),)


def _explain_missing_path(request: Request, error: ApiError) -> ApiError:
    path: str = request.scope["path"]
    if path in ("/v1/tokenize", "/v1/detokenize"):
        return ApiError(error.code, f"This route has no /v1 prefix: did you mean {path[3:]}?")
    if not path.startswith(_WITHOUT_PREFIX):
        return error
    return ApiError(error.code, f"API paths begin with /v1: did you mean /v1{path}?")
