"""The egress process: `python -m loraplex.api.webhooks.egress_process`.

Only this process connects to hosts that tenants name. It has no credentials: it gets each body with
its signature through a socket to the server, which is its standard input, and answers with a
status. Before it reads a delivery, it gives up all files except its programs and what names and
certificates need, and TCP to all ports except those of the allowed hosts and of the DNS. When the
socket closes, the process ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Iterable
from ipaddress import ip_network
from pathlib import Path
from typing import Never

import certifi

from ...adapters import landlock
from ...adapters.confinement import die_first, lower_limit
from ...adapters.json_frames import Inbox, MessageRefused, in_frame
from ...adapters.logs import log_to_stderr
from ...platform import errors
from ...platform.webhooks.target import TargetPolicy, parse_allowed_host
from .egress_messages import Deliver, Delivered, Open, Ready, ToEgress, decode_to_egress
from .sender import Sender

DNS_PORT = 53
MEMORY_BYTES = 2 << 30
"""Address space. Most of it is reserved by threads and not used."""
MAX_OPEN_FILES = 256
_RECEIVE_BYTES = 1 << 16
_RESOLVER_FILES = (
    *("/etc/resolv.conf", "/run/systemd/resolve", "/etc/hosts", "/etc/nsswitch.conf"),
    *("/etc/host.conf", "/etc/gai.conf", "/etc/services", "/etc/ld.so.cache"),
)
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")

_log = logging.getLogger("loraplex.api.webhooks.egress_process")  # its own name is "__main__"


class EgressService:
    """Answers the server's calls."""

    def __init__(self, sender: Sender, writer: asyncio.StreamWriter) -> None:
        self._sender = sender
        self._writer = writer
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, message: ToEgress) -> None:
        if not isinstance(message, Deliver):
            raise MessageRefused("it is open already")
        task = asyncio.create_task(self._deliver(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deliver(self, call: Deliver) -> None:
        answered = await self._sender.post(call.url, call.headers, call.body)
        self._writer.write(in_frame(Delivered(call.call_id, *answered)))


async def serve(connected: socket.socket) -> Never:
    """Until the server closes the socket."""
    reader, writer = await asyncio.open_unix_connection(sock=connected)
    inbox = Inbox()
    service: EgressService | None = None
    while data := await reader.read(_RECEIVE_BYTES):
        for content in inbox.take(data):
            message = decode_to_egress(content)
            if service is not None:
                service.take(message)
                continue
            service = EgressService(_open(message), writer)
            writer.write(in_frame(Ready()))
    os._exit(0)


def _open(message: ToEgress) -> Sender:
    """Confine this process, as the first message says."""
    if not isinstance(message, Open):
        raise MessageRefused(f"{type(message).__name__} came before Open")
    policy = TargetPolicy(
        tuple(map(parse_allowed_host, message.hosts)), tuple(map(ip_network, message.networks))
    )
    context = _trusting_context()
    confine(policy.ports)
    return Sender(policy, context)


def _trusting_context() -> ssl.SSLContext:
    """A context that trusts the usual authorities, or those that OpenSSL's variables name."""
    is_told = any(name in os.environ for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"))
    context = ssl.create_default_context(cafile=None if is_told else certifi.where())
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def confine(ports: Iterable[int]) -> None:
    """Give up files, ports and resources; cannot be undone. Call it before there are threads."""
    lower_limit(resource.RLIMIT_AS, MEMORY_BYTES)
    lower_limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    lower_limit(resource.RLIMIT_CORE, 0)
    reason = landlock.why_no_landlock()
    if reason is not None:
        _log.warning("egress_not_confined", extra={"reason": reason})
    landlock.allow_only(read=_readable(), write=(), connect=sorted({*ports, DNS_PORT}))


def _readable() -> list[Path]:
    """Python, its packages and ours, and what names and certificates need."""
    ours = (Path(__file__).parent, Path(landlock.__file__), Path(errors.__file__))
    certificates = filter(None, [os.environ.get("SSL_CERT_DIR", "")])
    return [
        *(file.resolve().parent for file in ours),
        *map(Path, filter(None, sys.path)),
        *map(Path, (*_LIBRARIES, *_RESOLVER_FILES, *certificates)),
    ]


def main() -> None:
    """Serve the socket on standard input."""
    log_to_stderr()
    logging.getLogger("httpcore").setLevel(logging.WARNING)  # it would write receivers' headers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C reaches the group: the server decides
    die_first()
    connected = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    try:
        asyncio.run(serve(connected))
    except MessageRefused:
        _log.exception("egress_message_not_understood")
        os._exit(1)


if __name__ == "__main__":
    main()
