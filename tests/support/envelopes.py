"""Checks the format of error responses."""

from __future__ import annotations

from typing import Any

import httpx

from loraplex.api.contract.error_codes import ERROR_CODES

ANTHROPIC_TYPES = {
    **dict.fromkeys((400, 409, 410, 415, 422), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""The families of Anthropic's API, by status."""


def check_envelope(answer: httpx.Response, code: str, param: str | None = None) -> dict[str, Any]:
    """The error of an answer, which is `code` as it is published."""
    published = ERROR_CODES[code]
    assert answer.status_code == published.status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-should-retry"] == str(published.retryable).lower()
    assert ("retry-after-ms" in answer.headers) == published.retryable
    error, kind = answer.json()["error"], published.type
    if answer.request.url.path.startswith("/v1/messages") and code != "malformed_request":
        kind = ANTHROPIC_TYPES[published.status]
        assert answer.json() == {
            "type": "error",
            "error": error,
            "request_id": error["request_id"],
        }, answer.text
        assert answer.headers["request-id"] == error["request_id"]
    else:
        assert list(answer.json()) == ["error"]
    assert set(error) == {"message", "type", "param", "code", "retryable", "request_id"}
    assert error["code"] == code
    assert error["type"] == kind
    assert error["retryable"] is published.retryable
    assert error["request_id"] == answer.headers["x-request-id"]
    assert error["param"] == param
    assert error["message"]
    checked: dict[str, Any] = error
    return checked
