"""Servers forked from one warm process: what they import, 2 s of CPU, is imported once.

`python -m support.nursery` forks a `loraplex` command for each order on its standard input.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Never
from unittest.mock import patch

import msgspec

from support.forked_engine import IMPORTS as ENGINE_IMPORTS
from support.forked_engine import create_subprocess_exec

POLL_SECONDS = 0.01
TRAINER_VARIABLE = "TEST_TRAINER"
"""In the environment of a forked server: the module that it runs as its trainers."""
_ASKING = threading.Lock()
"""Held from a question to the nursery to its answer."""


class Fork(msgspec.Struct, tag=True):
    """An order to run `loraplex` with these arguments; answered by its process id."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    """Its working directory."""
    log: str
    """The file to which its output is appended."""
    engine: str | None
    """The module that a server starts as its engine process; None: the product's, forked."""


class Look(msgspec.Struct, tag=True):
    """An order to tell the status with which a process ended; answered by null while it runs."""

    pid: int


class ForkedServer:
    """What the tests use of `subprocess.Popen`, for a process of the nursery's."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _ask(Look(self.pid))
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or float("inf"))
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("loraplex", timeout or 0)
            time.sleep(POLL_SECONDS)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_server(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path, engine: str | None
) -> ForkedServer:
    """Run `loraplex` with these arguments as the leader of a session of its own."""
    pid = _ask(Fork(list(arguments), dict(environment), os.getcwd(), str(log), engine))
    assert pid is not None
    return ForkedServer(pid)


def _ask(order: Fork | Look) -> int | None:
    with _ASKING:
        nursery = _nursery()
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        nursery.stdin.write(msgspec.json.encode(order) + b"\n")
        nursery.stdin.flush()
        answer = nursery.stdout.readline()
    return msgspec.json.decode(answer, type=int | None)


@cache
def _nursery() -> subprocess.Popen[bytes]:
    """Ends with this process, whose end of its standard input is closed then."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "support.nursery"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TQDM_DISABLE": "1",  # what engines set for themselves before they import it
        },
    )


# --- in the nursery -----------------------------------------------------------------------------


def main() -> None:
    """Carry out orders until there are no more."""
    for name in ("loraplex.api.cli.serve", "loraplex.api.serve", *ENGINE_IMPORTS):
        import_module(name)
    gc.freeze()  # a collection in a forked process would copy all pages
    for order in _orders():
        if isinstance(order, Look):
            _answer(_status(order.pid))
        elif pid := os.fork():
            _answer(pid)
        else:
            _become(order)


def _orders() -> Iterator[Fork | Look]:
    for line in sys.stdin.buffer:
        yield msgspec.json.decode(line, type=Fork | Look)


def _answer(number: int | None) -> None:
    os.write(1, msgspec.json.encode(number) + b"\n")


def _status(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _become(order: Fork) -> Never:
    """Run the command in this process, which is a new one."""
    from loraplex.api.cli import main as run

    os.setsid()
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    output = os.open(order.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    os.close(nothing)
    os.close(output)
    sys.argv = ["loraplex", *order.arguments]
    if module := order.environment.get(TRAINER_VARIABLE):
        _train_with(module)
    if order.engine:
        _start_as_engine(order.engine)
    else:
        asyncio.create_subprocess_exec = create_subprocess_exec  # type: ignore[assignment]
    sys.exit(run())


def _train_with(module: str) -> None:
    from loraplex.api.server import tuning_services

    python = (sys.executable, "-P", "-m")
    patch.object(tuning_services, "TRAINER_COMMAND", (*python, module)).start()
    patch.object(tuning_services, "RELAY_COMMAND", (*python, "support.relay", module)).start()


def _start_as_engine(module: str) -> None:
    from loraplex.api.server import planes
    from loraplex.engine.process.client import EngineClient

    command = (sys.executable, "-P", "-m", module)
    patch.object(planes, "EngineClient", partial(EngineClient, command=command)).start()


if __name__ == "__main__":
    main()
