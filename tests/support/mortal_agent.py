"""Agents that are killed and started again.

`python -m support.mortal_agent ENGINE BASE DATA_DIR PORT CERTIFICATES STORE` is one: the real agent
and fetcher around an engine whose restarts are quick.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

from loraplex.api.cli import agent
from loraplex.api.settings import Settings
from loraplex.engine.config import EngineConfig
from loraplex.engine.fleet import replica
from loraplex.engine.fleet.certificates import AGENT_NAME, API_NAME
from loraplex.engine.messages import ReplicaRole
from loraplex.engine.process.client import EngineClient
from loraplex.engine.process.supervisor import RestartPolicy
from support.fleet_certificates import Authority
from support.mortal_server import SMALL, is_alive
from support.processes import descendants
from support.server import FAKE_ENGINE, child_environment, free_port
from support.waiting import wait_for

HOST = "127.0.0.1"


class MortalAgent:
    """An agent at one address, of which there are several lives one after another."""

    def __init__(
        self, base: Path, folder: Path, *, certificates: Path, store: Path, engine: str
    ) -> None:
        folder.mkdir()
        self.port = free_port()
        self.log = folder / "agent.log"
        self._engine = engine
        self._num_old_bytes = 0
        """Of the log: those of earlier lives."""
        self._arguments = [engine, base, folder, self.port, certificates, store]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Begin a life."""
        self._num_old_bytes = self.log.stat().st_size if self.log.exists() else 0
        command = [sys.executable, "-P", "-m", "support.mortal_agent"]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, *map(str, self._arguments)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=child_environment(),
            )

    def is_listening(self) -> bool:
        text = self.log.read_bytes()[self._num_old_bytes :].decode()
        assert is_alive(self.pid), text[-4000:]
        return f"Serving API servers at {self.address}" in text

    def engine_pid(self) -> int | None:
        """The engine's process; None while there is none."""
        lines = descendants(self.pid).items()
        return next((pid for pid, line in lines if self._engine in line.split("\0")), None)

    def kill(self) -> None:
        """End this life at once, and its engine with it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """End this life in order; its exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=60)


@contextmanager
def mortal_agents(
    number: int, base: Path, folder: Path, *, engine: str = FAKE_ENGINE, seconds: float = 60
) -> Iterator[tuple[list[MortalAgent], dict[str, str]]]:
    """Running agents, and the environment of servers that use them. `seconds`: to start in."""
    certificates, store = issue_certificates(folder), folder / "store"
    agents = [
        MortalAgent(
            base, folder / f"agent-{index}", certificates=certificates, store=store, engine=engine
        )
        for index in range(number)
    ]
    try:
        for each in agents:
            each.start()
        for each in agents:
            wait_for(each.is_listening, seconds=seconds)
        yield (
            agents,
            {
                "LORAPLEX_FLEET_CERTIFICATES": str(certificates),
                "LORAPLEX_REPLICA_ADDRESSES": ",".join(each.address for each in agents),
                "LORAPLEX_STORE": str(store),
            },
        )
    finally:
        for each in agents:
            each.kill()


def issue_certificates(folder: Path) -> Path:
    """A folder with the certificates of a fleet."""
    authority, issued = Authority(folder / "authority"), folder / "certificates"
    issued.mkdir()
    for name, stem in ((AGENT_NAME, "agent"), (API_NAME, "api")):
        files = authority.issue(name)
        shutil.copy(files.authority, issued / "authority.pem")
        shutil.copy(files.certificate, issued / f"{stem}.pem")
        shutil.copy(files.key, issued / f"{stem}.key")
    return issued


def main(engine: str, base: str, data_dir: str, port: str, certificates: str, store: str) -> None:
    restarts = RestartPolicy(first_delay_seconds=0.02, max_delay_seconds=0.05, max_deaths=1000)
    client = partial(EngineClient, restarts=restarts)
    command = (sys.executable, "-P", "-m", engine)
    kind = partial(replica.Replica, command=command)
    settings = Settings(data_dir=Path(data_dir), store=store)
    with patch.object(replica, "EngineClient", client), patch.object(replica, "Replica", kind):
        agent._run(
            settings,
            EngineConfig(base, **SMALL),
            Path(certificates),
            ReplicaRole.BOTH,
            host=HOST,
            port=int(port),
        )
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
