"""Sends one request to a checked address, and reads no more than the head of its answer.

The name is resolved once. The connection is made to one of the addresses that were checked, so a
name whose addresses change between the check and the connection changes nothing. TLS and the
`Host` header keep the name. Redirects are not followed, and no proxy is used.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import NamedTuple

import httpcore

from ...platform.errors import WebhookHostNotAllowed, WebhookUrlInvalid
from ...platform.networks import Address
from ...platform.webhooks.event_types import Failure
from ...platform.webhooks.target import Target, TargetPolicy
from .retry_after import seconds_to_wait

SEND_SECONDS = 5.0
"""For a whole delivery: resolving, connecting, TLS, sending, and the head of the answer."""
MAX_ADDRESSES = 3
"""Addresses of a name that are tried, one after another."""
MAX_AT_ONCE = 64
"""Deliveries, and threads that resolve names."""
_GONE = 410

Resolve = Callable[[str, int], Sequence[Address]]


class Answered(NamedTuple):
    """The result of a delivery."""

    status: int | None
    """None: there was no answer."""
    failure: Failure | None
    """None: delivered."""
    retry_after: int | None = None
    """Seconds until the receiver wants the next attempt, if it says so."""


def resolve(host: str, port: int) -> list[Address]:
    """The addresses of a name, in the system's order. Blocks. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(ip_address(address[0]) for *_, address in found))


class Sender:
    """Sends to what the policy allows."""

    def __init__(
        self,
        policy: TargetPolicy,
        context: ssl.SSLContext,
        *,
        resolve: Resolve = resolve,
        seconds: float = SEND_SECONDS,
    ) -> None:
        self._policy = policy
        self._context = context
        self._resolve = resolve
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="resolve")

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> Answered:
        """Send the body; returns what came of it, after `seconds` at the latest.

        A name that takes longer to resolve delays the return: the caller's limits on deliveries at
        once then also bound the threads.
        """
        try:
            target = self._policy.check(url)
        except (WebhookUrlInvalid, WebhookHostNotAllowed):
            return Answered(None, Failure.HOST_NOT_ALLOWED)
        loop = asyncio.get_running_loop()
        lookup = loop.run_in_executor(self._threads, self._resolve, target.host, target.port)
        try:
            async with asyncio.timeout(self._seconds):
                return await self._send(target, lookup, headers, body)
        except TimeoutError:
            return Answered(None, Failure.TIMEOUT)
        finally:
            await asyncio.wait([lookup])

    async def _send(
        self,
        target: Target,
        lookup: asyncio.Future[Sequence[Address]],
        headers: Mapping[str, str],
        body: bytes,
    ) -> Answered:
        try:
            addresses = await asyncio.shield(lookup)
        except (OSError, ValueError):  # ValueError: an answer that is no address
            return Answered(None, Failure.NAME_NOT_RESOLVED)
        if not all(map(self._policy.allows, addresses)):
            return Answered(None, Failure.ADDRESS_NOT_ALLOWED)
        try:
            return await self._exchange(target, addresses, headers, body)
        except httpcore.ProtocolError:
            return Answered(None, Failure.ANSWER_INVALID)
        except httpcore.TimeoutException:
            return Answered(None, Failure.TIMEOUT)
        except httpcore.NetworkError as exc:
            return Answered(None, _why_not_connected(exc))

    async def _exchange(
        self,
        target: Target,
        addresses: Sequence[Address],
        headers: Mapping[str, str],
        body: bytes,
    ) -> Answered:
        url = httpcore.URL(
            scheme=b"https",
            host=target.host.encode(),
            port=target.port,
            target=target.path.encode(),
        )
        backend = _PinnedBackend(addresses[:MAX_ADDRESSES], self._seconds)
        async with httpcore.AsyncConnectionPool(
            self._context, network_backend=backend, max_connections=1, http2=False
        ) as pool:
            sent = [(name.encode(), value.encode()) for name, value in headers.items()]
            async with pool.stream("POST", url, headers=sent, content=body) as response:
                # Leaving closes the connection; the body stays unread.
                status = response.status
                retry_after = seconds_to_wait(status, response.headers, datetime.now(UTC))
                return Answered(status, _failure_of(status), retry_after)


class _PinnedBackend(httpcore.AsyncNetworkBackend):
    """Connects to these addresses, whatever the name."""

    def __init__(self, addresses: Sequence[Address], seconds: float) -> None:
        self._addresses = addresses
        self._seconds_each = seconds / (len(addresses) + 1)
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """The first connection that comes about. Raises the last address's error."""
        error: Exception = httpcore.ConnectError("the name has no address")
        for address in self._addresses:
            try:
                return await self._network.connect_tcp(
                    str(address), port, timeout=self._seconds_each, socket_options=socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as exc:
                error = exc
        raise error


def _failure_of(status: int) -> Failure | None:
    if 200 <= status < 300:
        return None
    if status == _GONE:
        return Failure.GONE
    return Failure.REDIRECT if 300 <= status < 400 else Failure.STATUS


def _why_not_connected(error: BaseException) -> Failure:
    """TLS errors reach us as the cause of a failed connection."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Failure.CERTIFICATE_INVALID
        cause = cause.__cause__ or cause.__context__
    return Failure.CONNECTION_FAILED
