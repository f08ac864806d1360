"""An agent's process is started again when it ends, and ends when its parent does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loraplex.api.ray.agent_process import AgentProcess, agent_environment
from support.server import child_environment
from support.waiting import wait_for

# Listens as an agent does, and writes its number; its first option names a folder.
AGENT = """
import os, signal, socket, sys
from pathlib import Path
folder, host, port = Path(sys.argv[1]), *sys.argv[-1].rsplit(":", 1)
(folder / str(os.getpid())).touch()
if (folder / "broken").exists():
    sys.exit("no room for the model")
listener = socket.create_server((host, int(port)))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(f"Serving API servers at {host}:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
while sys.stdin.read(1):
    pass
"""
COMMAND = (sys.executable, "-c", AGENT)


@contextmanager
def running(folder: Path) -> Iterator[AgentProcess]:
    agent = AgentProcess([str(folder)], host="127.0.0.1", command=COMMAND, pause=lambda _: 0.01)
    agent.start()
    try:
        yield agent
    finally:
        agent.stop()
        agent.join(30)


def address_of(agent: AgentProcess, num_starts: int) -> str:
    """Once this number of processes has been started."""
    wait_for(lambda: agent.report().num_starts >= num_starts and agent.report().address)
    return agent.report().address or ""


def test_an_agent_that_ends_listens_again_at_its_address(tmp_path: Path) -> None:
    with running(tmp_path) as agent:
        address = address_of(agent, 1)
        (pid,) = os.listdir(tmp_path)
        os.kill(int(pid), signal.SIGKILL)
        assert address_of(agent, 2) == address


def test_an_agent_that_cannot_start_says_why_and_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    with running(tmp_path) as agent:
        failure = wait_for(lambda: agent.report().failure)
        assert failure == "exit code 1: no room for the model"
        (tmp_path / "broken").unlink()
        assert address_of(agent, 2)
        assert agent.report().failure is None


def test_a_stopped_agent_ends_and_is_not_started_again(tmp_path: Path) -> None:
    with running(tmp_path) as agent:
        address_of(agent, 1)
        agent.stop()
        wait_for(lambda: agent.report().has_ended)
        assert agent.report().num_starts == 1


def test_an_agent_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from loraplex.api.ray.agent_process import AgentProcess\n"
        "agent = AgentProcess([sys.argv[1]], host='127.0.0.1', command=sys.argv[2:])\n"
        "agent.start()\n"
        "while not agent.report().address: time.sleep(0.01)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    # Ends by its input alone, as `agent_child` does.
    module = (sys.executable, "-c", AGENT)
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), *module],
        stdout=subprocess.PIPE,
        env=child_environment(),
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        (pid,) = os.listdir(tmp_path)
        parent.kill()
    wait_for(lambda: not Path(f"/proc/{pid}").exists())


def test_an_agent_knows_no_database_no_secret_and_no_token_of_ray() -> None:
    environment = {
        "LORAPLEX_DATABASE": "postgresql+psycopg://u:p@h/d",
        "LORAPLEX_SECRET": "0" * 64,
        "LORAPLEX_SECRET_PREVIOUS": "1" * 64,
        "RAY_AUTH_TOKEN": "t",
        "LORAPLEX_STORE": "s3://bucket",
        "AWS_PROFILE": "agents",
    }
    assert agent_environment(environment) == {
        "LORAPLEX_STORE": "s3://bucket",
        "AWS_PROFILE": "agents",
    }
