"""The one place that knows how an error looks over HTTP.

Every error answer is `{"error": {message, type, param, code, retryable, request_id}}`; `code` is
one of the published `ERROR_CODES`, and `x-should-retry` tells the official clients what to do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..adapters.errors import AdapterError, AdapterRejected, StorageFull
from ..engine.errors import EngineError, EngineRestarted, EngineUnavailable
from ..engine.messages import ErrorInfo
from ..platform.errors import DiskShareExceeded, PlatformError
from .error_codes import ERROR_CODES, ErrorCode

DEFAULT_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 30.0
FULL_DISK_RETRY_SECONDS = 60.0
"""Room is made by what others finish, abandon or delete."""
_ENGINE_DOWN_CODES = frozenset({EngineUnavailable.code, EngineRestarted.code})
_FULL_DISK_CODES = frozenset({StorageFull.code, DiskShareExceeded.code})
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
_UNION_BRANCHES = frozenset({"str", "token_ids"})


class ApiError(Exception):
    """An answer that is an error: a published code, and what the caller should know."""

    def __init__(
        self,
        code: str,
        message: str | None = None,
        *,
        param: str | None = None,
        retry_after_seconds: float | None = None,
        retryable: bool | None = None,
    ) -> None:
        """`retry_after_seconds` is when another try is worth it, where that is known; `retryable`
        whether the same may succeed later, where that is not the same for all errors of the code.
        """
        self.code = code
        self.message = message or ERROR_CODES[code].meaning
        self.param = param
        self.retry_after_seconds = retry_after_seconds
        self.retryable = self.published.retryable if retryable is None else retryable
        super().__init__(self.message)

    @property
    def published(self) -> ErrorCode:
        return ERROR_CODES[self.code]


class ErrorBody(msgspec.Struct, frozen=True):
    """What a caller reads about an error."""

    message: str
    type: str
    param: str | None
    code: str
    retryable: bool
    request_id: str


class ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorBody


def error_body(error: ApiError, request_id: str) -> ErrorBody:
    """What the caller reads about this error."""
    return ErrorBody(
        message=error.message,
        type=error.published.type,
        param=error.param,
        code=error.code,
        retryable=error.retryable,
        request_id=request_id,
    )


def encode_error(error: ApiError, request_id: str) -> bytes:
    """The envelope as JSON: a whole body, or the data of the last event of a failed stream."""
    return msgspec.json.encode(ErrorEnvelope(error_body(error, request_id)))


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
        encode_error(error, request.state.request_id),
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


def as_api_error(error: Exception) -> ApiError:
    """The published form of any layer's error; what is not published becomes `internal_error`."""
    match error:
        case ApiError():
            return error
        case ValidationError():
            return _from_validation(error.errors(include_url=False))
        case RequestValidationError():
            return _from_validation(error.errors(), num_skipped=1)
        case AdapterRejected():
            return _published(error.reason, str(error), error.pointer)
        case AdapterError():
            return _published(error.code, str(error), error.pointer)
        case EngineError():
            param = getattr(error, "param", None)
            return _published(
                error.code, str(error), param, error.retry_after_seconds, error.is_retryable
            )
        case PlatformError():
            retry_after = getattr(error, "retry_after_seconds", None)
            return _published(error.code, str(error), getattr(error, "param", None), retry_after)
        case HTTPException() if error.status_code in _HTTP_CODES:
            return ApiError(_HTTP_CODES[error.status_code])
        case _:
            return ApiError("internal_error")


def from_error_info(info: ErrorInfo) -> ApiError:
    """The published form of an error that crossed the engine's border as data."""
    return _published(info.code, info.message, None, info.retry_after_seconds, info.is_retryable)


def answer_error(request: Request, error: Exception) -> Response:
    """The answer for any layer's error; whom it refuses is left for the audit log."""
    request.state.refused = getattr(error, "refused", None)
    return error_response(request, as_api_error(error))


def install_error_handlers(app: FastAPI) -> None:
    """Answer every expected error with the envelope; the unexpected is the middleware's."""

    async def answer(request: Request, error: Exception) -> Response:
        return answer_error(request, error)

    async def answer_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        published = as_api_error(error)
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


def _published(
    code: str,
    message: str,
    param: str | None,
    retry_after_seconds: float | None = None,
    retryable: bool | None = None,
) -> ApiError:
    if code not in ERROR_CODES:
        return ApiError("internal_error")
    return ApiError(
        code,
        message,
        param=param,
        retry_after_seconds=retry_after_seconds,
        retryable=retryable,
    )


def _from_validation(errors: Sequence[Mapping[str, object]], num_skipped: int = 0) -> ApiError:
    """`num_skipped` parts of the location say where the field is: query or path."""
    first = errors[0]
    kind, message = str(first["type"]), str(first["msg"])
    if kind == "json_invalid":
        return ApiError("invalid_json", message)
    context = first.get("ctx")
    field = context.get("field") if isinstance(context, dict) else None
    location = first["loc"]
    assert isinstance(location, tuple)
    param = (
        ".".join(str(part) for part in (*location[num_skipped:], field) if _names_a_field(part))
        or None
    )
    code = "unsupported_parameter" if kind == "unsupported_parameter" else "invalid_parameter"
    return ApiError(code, f"{param}: {message}" if param else message, param=param)


def _names_a_field(part: object) -> bool:
    """False for what pydantic adds to a location: branches of unions and `[key]`."""
    return part is not None and part not in _UNION_BRANCHES and "[" not in str(part)


def _explain_missing_path(request: Request, error: ApiError) -> ApiError:
    path: str = request.scope["path"]
    if path in ("/v1/tokenize", "/v1/detokenize"):
        return ApiError(error.code, f"This route has no /v1 prefix: did you mean {path[3:]}?")
    if not path.startswith(("/chat/", "/completions", "/embeddings", "/models", "/responses")):
        return error
    return ApiError(error.code, f"API paths begin with /v1: did you mean /v1{path}?")
