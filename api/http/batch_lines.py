"""Requests that this server sends to itself: the lines of batches."""

from __future__ import annotations

from starlette.requests import Request

from ..batches.line import LINE, BatchLine


def line_of(request: Request) -> BatchLine | None:
    """The line whose request this is; None if a client has sent it."""
    line: BatchLine | None = request.scope.get("state", {}).get(LINE)
    return line
