"""Servers that are killed and restarted quickly, forked from one warm process.

`python -m support.mortal_server ENGINE BASE DATA_DIR PORT [URL]` imports everything once. For each
line on its standard input it forks a server, and prints its process id.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import httpx
import msgspec

from loraplex.api.inference.ledger_writer import Owner
from loraplex.api.serve import bind, run_server
from loraplex.api.server import planes
from loraplex.api.server.planes import JOURNAL_FILE
from loraplex.api.settings import Settings
from loraplex.api.telemetry.logs import configure_logging
from loraplex.engine.config import EngineConfig
from loraplex.engine.process.client import EngineClient
from loraplex.engine.process.supervisor import RestartPolicy
from loraplex.engine.token_journal import SLOT_BYTES
from support.databases import database_of_server
from support.server import FAKE_ENGINE, ServerUnderTest, child_environment, free_port
from support.waiting import wait_for

SMALL: dict[str, Any] = {
    "num_threads": 1,
    "memory_bytes": 1 << 29,
    "host_cache_bytes": 1 << 26,
}
"""What the engine may take, to leave room for others on the machine."""
_SLOT = struct.Struct("@8Q")


class Counted(NamedTuple):
    """What the journal says of one sequence, whether or not its slot was freed since."""

    prompt: int
    cached: int
    generated: int


@dataclass
class MortalServer:
    """A server, of which there are several lives one after another."""

    nursery: subprocess.Popen[str]
    url: str
    settings: Settings
    log: Path
    engine: str
    """The module that is its engine's process."""
    pid: int = 0
    evidence: dict[tuple[str, int], Counted] = field(default_factory=dict)
    """By request and position of the sequence: what servers have counted, as far as collected."""

    def start(self) -> None:
        """Begin a life; returns once it serves."""
        assert self.nursery.stdin is not None
        assert self.nursery.stdout is not None
        self.nursery.stdin.write("start\n")
        self.nursery.stdin.flush()
        self.pid = int(self.nursery.stdout.readline())
        wait_for(self.is_ready, seconds=60)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready").is_success
        except httpx.TransportError:
            assert Path(f"/proc/{self.pid}").exists(), self.log.read_text()[-4000:]
            return False

    def engine_pid(self) -> int | None:
        """The engine's process; None while there is none."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        for child in children:
            try:
                command = Path(f"/proc/{child}/cmdline").read_bytes()
            except FileNotFoundError:
                continue
            if self.engine.encode() in command:
                return int(child)
        return None

    def kill(self) -> None:
        """End this life at once, and its engine with it; keep what it has counted."""
        os.kill(self.pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(self.pid), seconds=60)
        self.collect_evidence()

    def stop(self) -> int:
        """End this life in order; the exit status, 0 if it went well."""
        os.kill(self.pid, signal.SIGTERM)
        wait_for(lambda: not is_alive(self.pid), seconds=60)
        self.collect_evidence()
        # The nursery waits for it only when the next life begins: until then the kernel keeps it.
        return int(Path(f"/proc/{self.pid}/stat").read_text().split()[-1])

    def collect_evidence(self) -> None:
        """Read every slot that was ever used, past the product's own code; no server may run."""
        content = (self.settings.data_dir / JOURNAL_FILE).read_bytes()
        for start in range(0, len(content), SLOT_BYTES):
            words = _SLOT.unpack_from(content, start)
            if length := words[6]:
                owner = content[start + _SLOT.size : start + _SLOT.size + length]
                request_id = msgspec.msgpack.decode(owner, type=Owner).request_id
                _, position, counts_prompt, prompt, cached, generated, *_ = words
                is_counted = bool(counts_prompt)
                self.evidence[request_id, position] = Counted(
                    prompt * is_counted, cached * is_counted, generated
                )

    @property
    def counted(self) -> dict[str, Counted]:
        """By request, over its sequences; only what has begun."""
        sums: dict[str, Counted] = {}
        for (request_id, _), counted in self.evidence.items():
            before = sums.get(request_id, Counted(0, 0, 0))
            sums[request_id] = Counted(*map(sum, zip(before, counted, strict=True)))
        return {name: sum_ for name, sum_ in sums.items() if sum_.prompt or sum_.generated}

    def as_server(self) -> ServerUnderTest:
        """For making tenants and looking into the database."""
        return ServerUnderTest(self.url, None, self.settings, self.log)  # type: ignore[arg-type]


def is_alive(pid: int) -> bool:
    """It runs; a process that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextmanager
def mortal_server(
    base: Path,
    data_dir: Path,
    *,
    database: str | None = None,
    engine: str = FAKE_ENGINE,
    **environment: str,
) -> Iterator[MortalServer]:
    """A place for servers; none runs yet.

    What `LD_PRELOAD` names is for the servers alone, not for the processes that they start.
    """
    data_dir.mkdir(exist_ok=True)
    database = database or database_of_server(data_dir)
    port, log = free_port(), data_dir / "server.log"
    command = [sys.executable, "-P", "-m", "support.mortal_server"]
    arguments = [engine, str(base), str(data_dir), str(port), *([database] if database else [])]
    with log.open("ab") as output:
        nursery = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,
            env=child_environment(**environment),
        )
    settings = Settings(data_dir=data_dir, database=database)
    server = MortalServer(nursery, f"http://127.0.0.1:{port}", settings, log, engine)
    try:
        yield server
    finally:
        if server.pid and is_alive(server.pid):
            os.kill(server.pid, signal.SIGKILL)
        nursery.communicate(timeout=60)


def main(engine: str, base: str, data_dir: str, port: str, database: str | None = None) -> None:
    """Fork a server for each line that is read."""
    if os.environ.pop("LD_PRELOAD", None):
        time.sleep = _sleep  # type: ignore[assignment]
    child = 0
    for _ in sys.stdin:
        if child:
            os.waitpid(child, 0)
        child = os.fork()
        if not child:
            settings = Settings(data_dir=Path(data_dir), database=database)
            _serve(engine, EngineConfig(base, **SMALL), settings, int(port))
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()


def _sleep(seconds: float) -> None:
    """For `time.sleep`, whose system call libfaketime 0.9 breaks (EINVAL)."""
    select.select([], [], [], seconds)


def _serve(engine: str, config: EngineConfig, settings: Settings, port: int) -> None:
    restarts = RestartPolicy(first_delay_seconds=0.02, max_delay_seconds=0.05, max_deaths=1000)
    command = (sys.executable, "-P", "-m", engine)
    client = partial(EngineClient, command=command, restarts=restarts)
    os.dup2(2, 1)  # what is said to the test is the parent's to say
    configure_logging()
    with patch.object(planes, "EngineClient", client):
        run_server(
            settings,
            config,
            listener=bind("127.0.0.1", port),
            announce=lambda _: None,
            on_drain=lambda _: None,
        )
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
