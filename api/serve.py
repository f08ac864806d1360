"""Runs the application until a signal, then drains it."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

import uvicorn
import uvloop

from ..adapters.malloc import share_arena
from ..engine.config import EngineConfig
from .app import create_app
from .http.connections import Connections
from .http.handshakes import Handshakes
from .http.protocol import protocol_among
from .server.gc_tuning import collect_garbage, freeze_garbage
from .server.open_files import raise_open_files
from .server.runtime import Runtime, open_runtime
from .settings import Settings

GRACE_SECONDS = 5
"""For the last error events to reach their clients, after the drain."""
DRAIN_POLL_SECONDS = 0.05
SEND_BUFFER_BYTES = 64 << 10
"""The system's buffer for a client that does not read; by default it would grow to megabytes."""
UNREAD_SECONDS = 60
"""The system closes a connection whose peer has accepted no byte for this long."""
KEEP_ALIVE_SECONDS = 75
"""Longer than the idle time of common proxies, so that they close first."""


class DrainingServer(uvicorn.Server):
    """On a signal to stop, refuses new requests and lets running ones finish, for a limited time.

    While it drains it keeps listening: clients get an error with the reason, and load balancers see
    that it is not ready. Requests that outlast the drain end with an error.
    """

    def __init__(
        self, runtime: Runtime, connections: Connections, *, on_drain: Callable[[float], None]
    ) -> None:
        """`on_drain` is called with the drain time if requests are running when the server is told
        to stop."""
        drain_seconds = runtime.settings.drain_seconds
        self.app = create_app(runtime)
        super().__init__(
            uvicorn.Config(
                self.app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                http=protocol_among(connections),
                ws="none",
                # It would trust every client on this machine; see `peer_address`.
                proxy_headers=False,
                ssl_certfile=runtime.settings.ssl_certfile,
                ssl_keyfile=runtime.settings.ssl_keyfile,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )
        self._connections = connections
        self._accepting: asyncio.Task[None] | None = None
        """Accepts the connections of a server with a certificate."""
        self._engine = runtime.engine
        self._readiness = runtime.readiness
        self._drain_seconds = drain_seconds
        self._on_drain = on_drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start draining immediately. A second SIGTERM has no effect, a second ^C ends at once."""
        self._readiness.is_draining = True
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        context = self.config.ssl
        if context is None:
            await super().startup(sockets)
            return
        assert sockets is not None
        (listener,) = sockets
        await super().startup([])
        listener.listen(self.config.backlog)
        handshakes = Handshakes(context, self._make_protocol, self._connections)
        self._accepting = asyncio.create_task(handshakes.accept(listener))

    def _make_protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._readiness.is_draining = True
        await self._drain()
        await self._engine.stop()
        if self._accepting is not None:
            self._accepting.cancel()
        await super().shutdown(sockets)

    async def _drain(self) -> None:
        if not self._readiness.num_requests:
            return
        self._on_drain(self._drain_seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds):
                while self._readiness.num_requests and not self.force_exit:
                    await asyncio.sleep(DRAIN_POLL_SECONDS)


class CannotUseCertificate(Exception):
    """It or its key cannot be read, they do not belong together, or the key has a password."""


def check_certificate(settings: Settings) -> None:
    """Read the server's certificate before anything is loaded. Raises CannotUseCertificate."""
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        if key is not None:
            raise CannotUseCertificate("--ssl-keyfile needs --ssl-certfile")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password given, OpenSSL would ask the terminal for one.
        context.load_cert_chain(certificate, key, password="")
    except OSError as exc:
        files = certificate if key is None else f"{certificate} and {key}"
        raise CannotUseCertificate(f"cannot serve with {files}: {exc.strerror or exc}") from exc


class CannotListen(Exception):
    """The address cannot be used: it is in use, not on this machine, or not permitted."""

    def __init__(self, host: str, port: int, cause: OSError) -> None:
        option = "--port" if cause.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        super().__init__(
            f"cannot listen at {address(host, port)}: {cause.strerror}; choose another {option}"
        )


def address(host: str, port: int) -> str:
    """`host:port` as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(host: str, port: int) -> socket.socket:
    """The address to serve at, taken but not listening yet. Raises CannotListen."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_SECONDS * 1000)
    try:
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        raise CannotListen(host, port, exc) from exc
    return listener


def listen(listener: socket.socket) -> None:
    """Take connections. Raises CannotListen if another server was faster at the same address."""
    try:
        listener.listen()
    except OSError as exc:
        host, port = listener.getsockname()[:2]
        raise CannotListen(host, port, exc) from exc


def run_server(
    settings: Settings,
    engine_config: EngineConfig,
    *,
    listener: socket.socket,
    announce: Callable[[Runtime], None],
    on_drain: Callable[[float], None],
) -> None:
    """Serve until SIGTERM or SIGINT. `announce` is called when everything has started, `on_drain`
    with the drain time if requests are running at the signal.

    Raises CannotListen, DataDirInUse, or a PlatformError, EngineError or AdapterError if a part
    cannot start.
    """
    share_arena()
    connections = Connections.within(raise_open_files())

    async def serve() -> None:
        async with open_runtime(settings, engine_config) as runtime:
            _let_uvicorn_decide((signal.SIGTERM, signal.SIGINT))
            readiness = runtime.readiness
            listen(listener)
            announce(runtime)
            server = DrainingServer(runtime, connections, on_drain=on_drain)
            runtime.batches.start(server.app)
            freeze_garbage()
            collecting = asyncio.create_task(collect_garbage(lambda: not readiness.num_requests))
            try:
                await server.serve(sockets=[listener])
            finally:
                collecting.cancel()

    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def _let_uvicorn_decide(signals: Sequence[signal.Signals]) -> None:
    """A drained server exits with 0: uvicorn raises the signal again when it is done."""
    for number in signals:
        signal.signal(number, lambda _number, _frame: None)
