"""Errors in Anthropic's shape, for the paths that its clients call.

Every error response is `{"type": "error", "error": {...}, "request_id": ...}`. `error` has the
fields of the API's other errors; only its `type` is Anthropic's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from .answer_model import AnswerModel
from .errors import ApiError, ErrorBody, encode_error, error_body

MESSAGES_PATH = "/v1/messages"
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class MessageErrorEnvelope(AnswerModel):
    error: ErrorBody
    request_id: str
    type: Literal["error"] = "error"


def is_messages_path(path: str) -> bool:
    """Whether clients of Anthropic's API call this path."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def encode_message_error(error: ApiError, request_id: str) -> bytes:
    """The envelope as JSON."""
    status = error.published.status
    fallback = "api_error" if status >= 500 else "invalid_request_error"
    body = replace(error_body(error, request_id), type=_TYPES.get(status, fallback))
    return msgspec.json.encode(MessageErrorEnvelope(body, request_id))


def encode_error_of(path: str, error: ApiError, request_id: str) -> bytes:
    """The envelope that clients of this path expect, as JSON."""
    encode = encode_message_error if is_messages_path(path) else encode_error
    return encode(error, request_id)
