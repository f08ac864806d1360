"""Requests to the identity provider: bounded in time and size, and without redirects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx

from ..contract.errors import ApiError

MAX_BYTES = 256 << 10
TIMEOUT_SECONDS = 10.0
"""For a whole request, from the connection to the last byte."""


class Answer(NamedTuple):
    """A JSON object and its status."""

    status: int
    content: Mapping[str, Any]


class BoundedClient:
    """One per server. Follows no redirect: they could lead to other machines of the network."""

    def __init__(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._timeout_seconds = timeout_seconds
        # A compressed answer could be larger than its bytes.
        headers = {"accept": "application/json", "accept-encoding": "identity"}
        self._http = httpx.AsyncClient(headers=headers, timeout=timeout_seconds)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def send(
        self,
        method: str,
        url: str,
        *,
        form: Mapping[str, str] | None = None,
        auth: tuple[str, str] | None = None,
    ) -> Answer:
        """The answer to this request. Raises ApiError (`identity_provider_unavailable`)."""
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._send(method, url, form, auth)
        except (httpx.HTTPError, OSError, TimeoutError) as exc:
            raise unavailable("it cannot be reached") from exc

    async def _send(
        self,
        method: str,
        url: str,
        form: Mapping[str, str] | None,
        auth: tuple[str, str] | None,
    ) -> Answer:
        credentials = None if auth is None else httpx.BasicAuth(*auth)
        async with self._http.stream(method, url, data=form, auth=credentials) as response:
            if response.is_redirect:
                raise unavailable("it redirects to another address")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise unavailable("its answer is compressed")
            content = bytearray()
            async for part in response.aiter_raw():
                content += part
                if len(content) > MAX_BYTES:
                    raise unavailable("its answer is too large")
        try:
            parsed = json.loads(content)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise unavailable("its answer is not a JSON object")
        return Answer(response.status_code, parsed)


def unavailable(reason: str) -> ApiError:
    """The provider cannot be used now, for this reason: a fixed text."""
    return ApiError(
        "identity_provider_unavailable",
        f"The identity provider cannot be used: {reason}. Sign in with a password, or try later.",
    )
