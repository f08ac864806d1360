"""Checks the format of error responses."""

from __future__ import annotations

from typing import Any

import httpx

from loraplex.api.contract.error_codes import ERROR_CODES


def check_envelope(answer: httpx.Response, code: str, param: str | None = None) -> dict[str, Any]:
    """The error of an answer, which is `code` as it is published."""
    published = ERROR_CODES[code]
    assert answer.status_code == published.status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-should-retry"] == str(published.retryable).lower()
    assert ("retry-after-ms" in answer.headers) == published.retryable
    assert list(answer.json()) == ["error"]
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "retryable", "request_id"}
    assert error["code"] == code
    assert error["type"] == published.type
    assert error["retryable"] is published.retryable
    assert error["request_id"] == answer.headers["x-request-id"]
    assert error["param"] == param
    assert error["message"]
    return error
