"""Runs a `loraplex serve` child process on a free port, and always stops it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import NoReturn

import httpx

HOST = "127.0.0.1"
START_SECONDS = 180.0
STOP_SECONDS = 40.0
POLL_SECONDS = 0.1
LOG_TAIL_LINES = 20


class LocalServerFailed(Exception):
    """The server ended, or was not ready in time; the message ends with the end of its log."""


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A running server."""

    url: str
    """Without a trailing slash, and without `/v1`."""
    process: subprocess.Popen[bytes]


@contextmanager
def running_server(
    options: Sequence[str],
    *,
    port: int | None,
    log: Path,
    start_seconds: float | None = None,
) -> Iterator[LocalServer]:
    """Run `loraplex serve` with `options` until the block is left; None: any free port.

    Yields once the server is ready. Raises `LocalServerFailed` if it is not ready after
    `start_seconds` (None: START_SECONDS).
    """
    chosen = port or free_port()
    command = [sys.executable, "-m", "loraplex", "serve", "--host", HOST, "--port", str(chosen)]
    with ExitStack() as cleanup:
        # A signal between the fork and `_stop` being registered would leave the server running.
        with log.open("wb") as output, signals_deferred():
            process = subprocess.Popen(
                [*command, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**_caches_beside(log), **os.environ},
                # A new process group: ^C reaches this process only, which ends the server and its
                # children.
                start_new_session=True,
            )
            cleanup.callback(_stop, process)
        server = LocalServer(url=f"http://{HOST}:{chosen}", process=process)
        _wait_until_ready(server, log, start_seconds or START_SECONDS)
        yield server


def _caches_beside(log: Path) -> dict[str, str]:
    """transformers imports PyTorch's compiler, which makes a folder for temporary files at once."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(log.parent / "inductor")}


def leave_on_sigterm() -> None:
    """From now on SIGTERM unwinds this process's blocks, so that the server is stopped."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Handle SIGINT and SIGTERM only when the block ends. Main thread only."""
    received: list[int] = []
    handlers = {
        deferred: signal.signal(deferred, lambda number, _: received.append(number))
        for deferred in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for deferred, handler in handlers.items():
            signal.signal(deferred, handler)
        for number in received:
            signal.raise_signal(number)


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(server: LocalServer, log: Path, seconds: float) -> None:
    deadline = monotonic() + seconds
    while not _is_ready(server.url):
        if server.process.poll() is not None:
            raise LocalServerFailed(f"the server ended while it started\n{_tail(log)}")
        if monotonic() > deadline:
            raise LocalServerFailed(f"the server was not ready in time\n{_tail(log)}")
        sleep(POLL_SECONDS)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=2.0).is_success
    except httpx.TransportError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])
