"""A fleet on Ray on this machine: a head with token authentication, and its certificates."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from loraplex.api.demo.manifest import WEIGHTS
from loraplex.api.demo.recipe import BASE_NAME
from loraplex.engine.fleet.certificates import (
    AGENT_NAME,
    API_NAME,
    Certificates,
    agent_certificates,
    api_certificates,
)
from loraplex.platform.database import Database
from loraplex.platform.replicas import service as replicas
from support.fleet_certificates import Authority
from support.server import LORAPLEX, ServerUnderTest, child_environment, free_port, serving
from support.waiting import wait_for

HOST = "127.0.0.1"
BASE = WEIGHTS / "base"
MEMORY_OPTIONS = ("--arena-gib", "0.05", "--kv-cache-gib", "0.25")
AGENT_OPTIONS = (
    *("--model", str(BASE), "--num-threads", "1", "--host-cache-gib", "0.05"),
    *MEMORY_OPTIONS,
)
COMMAND_SECONDS = 160


@dataclass(frozen=True)
class Row:
    """A row of the table of replicas."""

    id: str
    address: str
    incarnation: str | None
    state: str | None


@dataclass(frozen=True)
class RayFleet:
    """A running head, and what its commands and API servers need."""

    folder: Path
    address: str
    environment: Mapping[str, str]
    num_ranks: int
    """Processes of each replica's stages."""
    num_stages: int = 1
    """Of each replica."""

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`loraplex fleet` with these arguments, to its end."""
        return subprocess.run(
            [*LORAPLEX, "fleet", *arguments, "--ray", self.address],
            env=child_environment(**self.environment),
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )

    def up(self, number: int, *options: str) -> subprocess.CompletedProcess[str]:
        """`loraplex fleet up` for this number of replicas, to its end."""
        certificates = ("--certificates", str(self.certificates))
        served = (*AGENT_OPTIONS, *self._base_options)
        return self.command("up", "--replicas", str(number), *options, *certificates, *served)

    def serving(self, name: str, *options: str) -> AbstractContextManager[ServerUnderTest]:
        """An API server of the fleet; all have the same secret."""
        data_dir = self.folder / name
        data_dir.mkdir()
        shutil.copy(self.folder / "secret", data_dir)
        certificates = ("--fleet-certificates", str(self.certificates))
        return serving(
            BASE,
            data_dir,
            *(*self._base_options, "--served-model-name", BASE_NAME, *certificates, *options),
            program=LORAPLEX,
            **self.environment,
        )

    @property
    def _base_options(self) -> tuple[str, ...]:
        """How the base is served; ranks have no `--quantize`."""
        if self.num_ranks * self.num_stages == 1:
            return ("--quantize", "int8")
        ranks, stages = str(self.num_ranks), str(self.num_stages)
        return ("--tensor-parallel-size", ranks, "--pipeline-parallel-size", stages)

    @property
    def certificates(self) -> Path:
        return self.folder / "certificates"

    def rows(self) -> dict[str, Row]:
        """The replicas by ID, in the order of their addition."""
        database = Database(self.environment["LORAPLEX_DATABASE"])
        with database.platform_transaction(read_only=True) as session:
            found = [
                Row(row.id, row.address, row.incarnation, row.state)
                for row in replicas.list_replicas(session)
            ]
        database.close()
        return {row.id: row for row in found}

    def set_draining(self, replica_id: str, is_draining: bool) -> None:
        """What `loraplex fleet drain` and `resume` write."""
        database = Database(self.environment["LORAPLEX_DATABASE"])
        with database.platform_transaction() as session:
            replicas.set_draining(session, replica_id, is_draining)
        database.close()

    def wait_ready(self, number: int, *, seconds: float = 120.0) -> None:
        """Until this number of replicas is ready, by their rows."""

        def are_ready() -> bool:
            rows = self.rows().values()
            return len(rows) == number and all(row.state == "ready" for row in rows)

        wait_for(are_ready, seconds=seconds)

    def wait_replaced(self, before: Row, *, seconds: float = 120.0) -> Row:
        """The replica's row once another agent serves."""

        def found() -> Row | None:
            now = self.rows()[before.id]
            is_other = now.incarnation != before.incarnation and now.state == "ready"
            return now if is_other else None

        row = wait_for(found, seconds=seconds)
        assert row is not None
        return row

    def agent_pid(self, replica_id: str) -> int:
        """The process of the replica's agent; fails if there is none."""
        (pid,) = self._pids("loraplex.api.cli.agent_child", replica_id)
        return pid

    def kill_agent(self, replica_id: str) -> None:
        os.kill(self.agent_pid(replica_id), signal.SIGKILL)

    def kill_actor(self, replica_id: str) -> None:
        """Kill the agent's parent."""
        os.kill(_parent(self.agent_pid(replica_id)), signal.SIGKILL)

    def stage_rank_pids(self) -> list[int]:
        """The ranks that are on other nodes than rank 0 of their replica."""
        actors = [pid for pid, line in _command_lines() if line.startswith("ray::StageActor")]
        raylets = set(self._pids("raylet", str(self.folder)))
        own = {pid for pid in actors if _parent(pid) in raylets}
        return [pid for pid in self._pids("loraplex.engine.ranks.main") if _parent(pid) in own]

    def nodes_of(self, *pids: int) -> set[int]:
        """The raylets on whose nodes these processes run."""
        raylets = set(self._pids("raylet", str(self.folder)))
        found = set()
        for pid in pids:
            while pid not in raylets:
                pid = _parent(pid)
            found.add(pid)
        return found

    def kill_node_of(self, pid: int) -> None:
        """Kill the raylet of this process, and with it all workers of the node."""
        (raylet,) = self.nodes_of(pid)
        os.kill(raylet, signal.SIGKILL)

    def controller_pid(self) -> int | None:
        """The controller's process; None while there is none."""
        raylets = set(self._pids("raylet", str(self.folder)))
        found = (pid for pid, line in _command_lines() if line.startswith("ray::Controller"))
        return next((pid for pid in found if _parent(pid) in raylets), None)

    def kill_controller(self) -> None:
        pid = self.controller_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def kill_head(self) -> None:
        """Kill Ray's control store, which knows of all actors; it does not come back."""
        for pid in self._pids("gcs_server", str(self.folder)):
            os.kill(pid, signal.SIGKILL)

    def logs(self) -> str:
        """What Ray's processes have written."""
        return "\n".join(path.read_text() for path in self.folder.glob("ray/session_*/logs/w*.err"))

    def _pids(self, *words: str) -> list[int]:
        """This fleet's processes whose command lines have all of these words."""
        return [pid for pid, line in _command_lines() if all(word in line for word in words)]


@contextmanager
def running_ray(
    *,
    num_cpus: int = 3,
    head_cpus: int | None = None,
    num_nodes: int | None = None,
    num_ranks: int = 1,
    num_stages: int = 1,
) -> Iterator[RayFleet]:
    """Ray on this machine with an empty database, until the block is left.

    `num_cpus`: of each node, and of the head unless `head_cpus` is given. `num_nodes`: the head
    among them; by default there is one for each stage. `num_ranks`: processes of each of the
    `num_stages` of a replica.
    """
    head_cpus = num_cpus if head_cpus is None else head_cpus
    num_nodes = num_stages if num_nodes is None else num_nodes
    folder = Path(tempfile.mkdtemp(prefix="lp-"))  # Ray's sockets need a short path
    try:
        _write_certificates(folder)
        for name in ("token", "secret"):
            _write_secret(folder / name)
        environment = _environment(folder)
        database = Database(environment["LORAPLEX_DATABASE"])
        database.upgrade()
        database.close()
        port = free_port()
        try:
            subprocess.run(
                _start_command(folder, port, head_cpus),
                env=child_environment(**environment),
                stdout=subprocess.DEVNULL,
                timeout=COMMAND_SECONDS,
                check=True,
            )
            for _ in range(1, num_nodes):
                subprocess.run(
                    _join_command(f"{HOST}:{port}", num_cpus),
                    env=child_environment(**environment),
                    stdout=subprocess.DEVNULL,
                    timeout=COMMAND_SECONDS,
                    check=True,
                )
            yield RayFleet(folder, f"{HOST}:{port}", environment, num_ranks, num_stages)
        finally:
            _end_processes(folder, port)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_certificates(folder: Path) -> None:
    target = folder / "certificates"
    authority = Authority(target)
    for name, paths in (
        (AGENT_NAME, agent_certificates(target)),
        (API_NAME, api_certificates(target)),
    ):
        issued: Certificates = authority.issue(name)
        issued.certificate.rename(paths.certificate)
        issued.key.rename(paths.key)


def _write_secret(path: Path) -> None:
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))


def _environment(folder: Path) -> dict[str, str]:
    """That of Ray's processes, the commands and the API servers."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # with Ray's own, 15, actors would wait for all other tests
        # Nodes outlast an absent head; see docs/fleet-ray.md.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
        "LORAPLEX_DATA_DIR": str(folder / "data"),
        "LORAPLEX_DATABASE": f"sqlite:///{folder / 'fleet.db'}",
        "LORAPLEX_STORE": (folder / "store").as_uri(),
    }


def _start_command(folder: Path, port: int, num_cpus: int) -> Sequence[str]:
    ray = str(Path(sys.executable).with_name("ray"))
    return (
        # Without --block, which ends the node when its control store ends.
        *(ray, "start", "--head", "--node-ip-address", HOST, "--port", str(port)),
        *("--include-dashboard=false", "--disable-usage-stats", "--num-cpus", str(num_cpus)),
        *("--object-store-memory", "80000000", "--temp-dir", str(folder / "ray")),
        *("--min-worker-port", "0", "--max-worker-port", "0"),
    )


def _join_command(address: str, num_cpus: int) -> Sequence[str]:
    """Another node of this machine."""
    ray = str(Path(sys.executable).with_name("ray"))
    return (
        *(ray, "start", "--address", address, "--node-ip-address", HOST),
        *("--disable-usage-stats", "--num-cpus", str(num_cpus)),
        *("--object-store-memory", "80000000", "--min-worker-port", "0", "--max-worker-port", "0"),
    )


def _end_processes(folder: Path, port: int) -> None:
    """End Ray's processes and all that they have started; nothing writes to the folder then."""
    # Ray's client server does not know the folder, and outlives its head.
    words = (str(folder), f":{port} --host=")

    def running() -> list[int]:
        return [pid for pid, line in _command_lines() if any(word in line for word in words)]

    for pid in running():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not running())


def _parent(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))


def _command_lines() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                yield (
                    int(entry.name),
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(),
                )
        except OSError:  # it has just ended
            continue
