"""The error format of the API, for errors of any layer.

Every error response is `{"error": {message, type, param, code, retryable, request_id}}`; `code` is
one of the published `ERROR_CODES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from pydantic import ValidationError

from ...adapters.errors import AdapterError, AdapterRejected
from ...engine.errors import EngineError
from ...engine.messages import ErrorInfo
from ...platform.errors import PlatformError
from .answer_model import AnswerModel
from .error_codes import ERROR_CODES, ErrorCode

_UNION_BRANCHES = frozenset({"str", "token_ids"})


class ApiError(Exception):
    """An error response: a published code, and a message for the caller."""

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


@dataclass(frozen=True, slots=True)
class ErrorBody(AnswerModel):
    """An error in a response."""

    message: str
    type: str
    param: str | None
    code: str
    retryable: bool
    request_id: str


@dataclass(frozen=True, slots=True)
class ErrorEnvelope(AnswerModel):
    error: ErrorBody


def error_body(error: ApiError, request_id: str) -> ErrorBody:
    """The response body of this error."""
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


def as_api_error(error: Exception) -> ApiError:
    """The published form of any layer's error; an unpublished error becomes `internal_error`."""
    match error:
        case ApiError():
            return error
        case ValidationError():
            return from_validation(error.errors(include_url=False))
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
        case _:
            return ApiError("internal_error")


def from_error_info(info: ErrorInfo) -> ApiError:
    """The published form of an error that crossed the engine's border as data."""
    return _published(info.code, info.message, None, info.retry_after_seconds, info.is_retryable)


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


def from_validation(errors: Sequence[Mapping[str, object]], num_skipped: int = 0) -> ApiError:
    """The published form of pydantic's errors: the first of them.

    The first `num_skipped` parts of the location name the kind of parameter: query or path.
    """
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
