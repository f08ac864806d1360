"""The process of an agent, which is started again whenever it ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ...platform.replicas.address import parse_address

AGENT_COMMAND = (sys.executable, "-P", "-m", "loraplex.api.cli.agent_child")
MAX_PAUSE_SECONDS = 60.0
"""Between an end and the next start, after several ends without having served."""
_LISTENING = re.compile(r"Serving API servers at (\S+)")
_KEPT_LINES = 5
_SECRETS = frozenset({"LORAPLEX_DATABASE", "LORAPLEX_SECRET", "LORAPLEX_SECRET_PREVIOUS"})
"""Variables of the node that an agent has no use for."""


class AgentReport(NamedTuple):
    """How an agent's process fares."""

    address: str | None = None
    """Where it listens; None: it is not ready, or this is not known."""
    num_starts: int = 0
    failure: str | None = None
    """Its last lines and exit code if it ended before it listened."""
    has_ended: bool = False
    """It was stopped, and is not there any more."""


class AgentProcess:
    """Runs `loraplex agent`; the process ends when this one does, however that ends.

    It listens on the same port again if it can, so that API servers find it without being told.
    """

    def __init__(
        self,
        options: Sequence[str],
        *,
        host: str,
        command: Sequence[str] = AGENT_COMMAND,
        pause: Callable[[int], float] | None = None,
    ) -> None:
        """`options` of `loraplex agent` but `--listen`. `pause`: seconds before the next start
        after this number of ends without having served."""
        self._command = (*command, *options)
        self._host = host
        self._pause = pause or _pause
        self._port = 0
        self._address: str | None = None
        self._num_starts = 0
        self._num_failures = 0
        self._failure: str | None = None
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._is_stopping = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)

    def start(self) -> None:
        """Start it in the background."""
        self._supervisor.start()

    def report(self) -> AgentReport:
        return AgentReport(
            address=self._address,
            num_starts=self._num_starts,
            failure=self._failure,
            has_ended=self._is_stopping.is_set() and not self._supervisor.is_alive(),
        )

    def stop(self) -> None:
        """Ask it to end, which takes until its open requests have ended; does not wait."""
        with self._lock:
            self._is_stopping.set()
            if self._process is not None:
                self._process.terminate()  # no effect if it has ended

    def join(self, seconds: float | None = None) -> None:
        """Wait until it has ended."""
        self._supervisor.join(seconds)

    def _supervise(self) -> None:
        while not self._is_stopping.is_set():
            self._run_once()
            if self._num_failures:
                self._is_stopping.wait(self._pause(self._num_failures))

    def _run_once(self) -> None:
        """Run a process to its end."""
        with self._lock:
            if self._is_stopping.is_set():
                return
            self._process = process = self._spawn()
        self._num_starts += 1
        last: deque[str] = deque(maxlen=_KEPT_LINES)
        with process:
            assert process.stderr is not None
            for line in process.stderr:
                sys.stderr.write(line)
                last.append(line.strip())
                if found := _LISTENING.fullmatch(line.strip()):
                    self._note_address(found[1])
        self._note_end(process.returncode, last)

    def _spawn(self) -> subprocess.Popen[str]:
        shown = f"[{self._host}]" if ":" in self._host else self._host
        return subprocess.Popen(
            [*self._command, "--listen", f"{shown}:{self._port}"],
            stdin=subprocess.PIPE,  # its end tells the agent that this process has ended
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=agent_environment(os.environ),
            start_new_session=True,
        )

    def _note_address(self, address: str) -> None:
        _, self._port = parse_address(address)
        self._num_failures, self._failure = 0, None
        self._address = address

    def _note_end(self, returncode: int, last: Iterable[str]) -> None:
        if self._address is None:
            self._num_failures += 1
            self._failure = f"exit code {returncode}: {' '.join(last)}"
            self._port = 0  # the one that it had may be another's now
        self._address = None


def agent_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """That of this process without what an agent must not know."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _SECRETS and not name.startswith("RAY_")
    }


def _pause(num_failures: int) -> float:
    return min(MAX_PAUSE_SECONDS, 2.0**num_failures)
