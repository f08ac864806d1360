"""Calls the HTTP API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import httpx

from ...adapters.rejections import REJECTIONS
from .connection import Connection
from .errors import (
    ApiRefused,
    ClientError,
    InvalidArgument,
    KeyUnusable,
    ServerUnreachable,
    UnexpectedAnswer,
)

TENANT_HEADER = "x-loraplex-tenant"
TIMEOUT = httpx.Timeout(60.0, connect=5.0)
SLOW_TIMEOUT = httpx.Timeout(1200.0, connect=5.0)
"""For what the server answers only when it is done: examinations, and deletions, which drain."""

_LISTS = {
    "adapter_not_found": ("/v1/adapters", "name"),
    "model_not_found": ("/v1/models", "id"),
    "operator_not_found": ("/admin/operators", "name"),
    "tenant_not_found": ("/admin/tenants", "slug"),
}
"""Where the names are listed that could have been meant."""

Filter = str | int | bool | Sequence[str] | None
"""A value of a query; of a sequence each item is sent."""


class ApiClient:
    """Calls the API; an error answer raises ApiRefused, what is no answer another ClientError."""

    def __init__(
        self, client: httpx.Client, url: str, *, tenant: str | None = None, prefix: str = "/v1"
    ) -> None:
        """`tenant` is on which an operator acts; `prefix` is before every path."""
        self._client = client
        self._headers = {} if tenant is None else {TENANT_HEADER: tenant}
        self._prefix = prefix
        self.url = url

    @property
    def admin(self) -> ApiClient:
        """The same for what belongs to no tenant: paths below `/admin`."""
        return ApiClient(self._client, self.url, prefix="/admin")

    def get(self, path: str, **query: Filter) -> Any:
        """Filters that are None are omitted."""
        sent = {name: value for name, value in query.items() if value is not None}
        return self._send("GET", path, params=sent)

    def pages(self, path: str, **query: Filter) -> Iterator[Any]:
        """Every entry of a list that is given page by page."""
        page = self.get(path, **query)
        yield from page["data"]
        while page["has_more"]:
            page = self.get(path, **query, after=page["next_after"])
            yield from page["data"]

    def post(
        self,
        path: str,
        body: Any = None,
        *,
        is_slow: bool = False,
        idempotency_key: str | None = None,
    ) -> Any:
        """`idempotency_key`: a repetition with the same key returns the first answer."""
        headers = None if idempotency_key is None else {"idempotency-key": idempotency_key}
        timeout = SLOW_TIMEOUT if is_slow else TIMEOUT
        return self._send("POST", path, json=body, headers=headers, timeout=timeout)

    def post_file(self, path: str, file: Path, **fields: str) -> Any:
        """Send a form with these fields and the file."""
        with file.open("rb") as content:
            files = {"file": (file.name, content)}
            return self._send("POST", path, data=fields, files=files, timeout=SLOW_TIMEOUT)

    def get_tagged(self, path: str) -> tuple[Any, str]:
        """A resource and its `ETag`."""
        response = self._request("GET", path)
        return response.json(), response.headers["etag"]

    def put(self, path: str, body: Any, *, if_match: str | None = None) -> Any:
        """`if_match`: refused unless the resource still has this `ETag`."""
        headers = None if if_match is None else {"if-match": if_match}
        return self._send("PUT", path, json=body, headers=headers)

    def patch(self, path: str, body: Any) -> Any:
        return self._send("PATCH", path, json=body)

    def put_bytes(self, path: str, content: bytes, *, offset: int) -> Any:
        """Send raw bytes that begin at `offset`."""
        return self._send(
            "PUT",
            path,
            content=content,
            params={"offset": offset},
            headers={"content-type": "application/octet-stream"},
        )

    def delete(self, path: str, **query: float | str) -> Any:
        return self._send("DELETE", path, params=query, timeout=SLOW_TIMEOUT)

    @contextmanager
    def download(self, path: str) -> Iterator[httpx.Response]:
        """A file's answer, whose content is yet to be read."""
        streaming = self._client.stream("GET", self._prefix + path, headers=self._headers)
        with self._reaching(), streaming as response:
            if not response.is_success:
                response.read()
                raise self._failure(response, path)
            yield response

    @contextmanager
    def stream(self, path: str, body: Any) -> Iterator[Iterator[Any]]:
        """The events of a streamed answer, as they come.

        Raises ClientError where the server refuses, or ends the stream with an error.
        """
        sent = self._client.stream("POST", self._prefix + path, json=body, headers=self._headers)
        with self._reaching(), sent as response:
            if not response.is_success:
                response.read()
                raise self._failure(response, path, body)
            yield self._events(response)

    def _events(self, response: httpx.Response) -> Iterator[Any]:
        is_whole = False
        for line in response.iter_lines():
            field, _, data = line.partition(": ")
            if field != "data":
                continue
            if data == "[DONE]":
                is_whole = True
                break
            event = json.loads(data)
            if "error" in event:
                raise _refused(event["error"], 503)
            yield event
        if not is_whole:
            raise ServerUnreachable(f"{self.url}: the response ended early")

    def _send(self, method: str, path: str, **options: Any) -> Any:
        response = self._request(method, path, **options)
        try:
            return response.json() if response.content else None
        except ValueError as exc:
            raise _not_ours(self.url) from exc

    def _request(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, **options: Any
    ) -> httpx.Response:
        sent = {**self._headers, **(headers or {})}
        with self._reaching():
            response = self._client.request(method, self._prefix + path, headers=sent, **options)
        if not response.is_success:
            raise self._failure(response, path)
        return response

    def _failure(
        self, response: httpx.Response, path: str, body: Mapping[str, Any] | None = None
    ) -> ClientError:
        """The error of an answer; for a name that is not there with the most similar one."""
        failure = _failure(response, self.url)
        if not isinstance(failure, ApiRefused) or failure.code not in _LISTS:
            return failure
        if failure.code == "model_not_found" and body is not None:
            wanted = str(body["model"])
        elif failure.code == "tenant_not_found" and TENANT_HEADER in self._headers:
            wanted = self._headers[TENANT_HEADER]
        else:
            wanted = unquote(path.split("/")[2])
        near = get_close_matches(wanted, self._names(failure.code), n=1)
        return failure.with_hint(f"Did you mean {near[0]!r}?") if near else failure

    def _names(self, code: str) -> list[str]:
        """Those that this key may list; none if it may not list any."""
        path, field = _LISTS[code]
        headers = {} if code == "tenant_not_found" else self._headers
        try:
            listed = self._client.get(path, headers=headers).json()["data"]
            return [str(entry[field]) for entry in listed]
        except (httpx.TransportError, ValueError, KeyError, TypeError):
            return []

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Raises ServerUnreachable for what fails on the way there and back."""
        try:
            yield
        except httpx.UnsupportedProtocol:
            raise InvalidArgument(
                "LORAPLEX_URL is not a URL. It must begin with http:// or https://."
            ) from None
        except httpx.TransportError as exc:
            reason = str(exc) or type(exc).__name__
            ask = ". Check that the server is running and that LORAPLEX_URL is correct."
            raise ServerUnreachable(
                f"{self.url}: {reason}{ask if isinstance(exc, httpx.ConnectError) else ''}"
            ) from exc


def api_path(*parts: str | int) -> str:
    """The path with these parts, escaped so that no part can end it or start a query."""
    return "".join(f"/{quote(str(part), safe='')}" for part in parts)


def connect(connection: Connection) -> httpx.Client:
    """An HTTP client that sends the key. Raises KeyUnusable and InvalidArgument."""
    # Checked here, because errors about an invalid header value would contain it.
    if not (connection.key.isascii() and connection.key.isprintable()):
        raise KeyUnusable("The API key is malformed.")
    headers = {"authorization": f"Bearer {connection.key}"}
    try:
        return httpx.Client(base_url=connection.url, headers=headers, timeout=TIMEOUT)
    except httpx.InvalidURL:
        raise InvalidArgument("LORAPLEX_URL is not a URL.") from None


def _not_ours(url: str, answer: str = "") -> UnexpectedAnswer:
    """The responder is not a Loraplex server, or is a proxy without a server behind it."""
    shown = f"answers{answer}, not" if answer else "does not answer"
    return UnexpectedAnswer(f"{url} {shown} as a Loraplex server. Check LORAPLEX_URL.")


def _failure(response: httpx.Response, url: str) -> ClientError:
    try:
        return _refused(response.json()["error"], response.status_code)
    except (ValueError, KeyError, TypeError):
        return _not_ours(url, f" {response.status_code}")


def _refused(error: dict[str, Any], status: int) -> ApiRefused:
    refusal = ApiRefused(
        error["message"],
        code=error["code"],
        status=status,
        param=error.get("param"),
        is_retryable=error.get("retryable") is True,
        request_id=error.get("request_id"),
    )
    # The remedy for a refused adapter, unless the message contains it.
    known = REJECTIONS.get(refusal.code)
    if known and known.way_out not in refusal.message:
        refusal.with_hint(known.way_out)
    return refusal
