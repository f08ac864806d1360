"""The reported confinement matches what a confined child can and cannot do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loraplex.adapters import child, confinement_probe
from loraplex.adapters.confinement import Mechanism
from loraplex.adapters.confinement_probe import ConfinementReport, measure_confinement
from loraplex.adapters.errors import ConfinementMissing
from loraplex.adapters.landlock import landlock_version
from support import container_profile
from support.server import child_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux confines")

REPORT = """
import json
from loraplex.adapters.confinement_probe import measure_confinement
report = measure_confinement()
print(json.dumps({
    "in_force": {state.name: state.is_in_force for state in report.mechanisms},
    "details": {state.name: state.detail for state in report.mechanisms},
    "missing": [state.name for state in report.missing],
    "possible": [act.act for act in report.possible],
}))
"""
FILES = {"read_file", "write_file", "list_folder", "truncate_file", "read_server_environment"}
NETWORK = {"connect_tcp", "send_udp", "connect_abstract_socket"}
RESOURCES = {"exceed_memory", "exceed_file_size", "exceed_open_files", "exceed_time"}
HAS_NAMESPACES = (
    shutil.which("unshare") is not None
    and subprocess.run(["unshare", "--user", "--net", "true"], capture_output=True).returncode == 0
)
"""As util-linux finds it."""


def states(report: ConfinementReport) -> dict[str, bool]:
    return {state.name: state.is_in_force for state in report.mechanisms}


@pytest.fixture(scope="module")
def here() -> ConfinementReport:
    return measure_confinement()


def test_what_the_kernel_offers_is_in_force_and_prevents_what_it_must(
    here: ConfinementReport,
) -> None:
    possible = {act.act for act in here.possible}
    assert states(here)[Mechanism.LANDLOCK] is (landlock_version() > 0)
    assert states(here)[Mechanism.NAMESPACES] is HAS_NAMESPACES
    assert states(here)[Mechanism.LIMITS]
    assert not possible & RESOURCES
    if HAS_NAMESPACES:
        assert not possible & NETWORK
    if landlock_version() >= 3:  # with truncation
        assert not possible & {*FILES, "execute"}
    assert ("fork" in possible) is (os.geteuid() == 0)
    if not here.missing:
        here.check()


@pytest.fixture(scope="module")
def in_a_container() -> dict[str, object]:
    """What is measured where system calls are forbidden as older container runtimes do."""
    command = [sys.executable, container_profile.__file__, sys.executable, "-c", REPORT]
    found: dict[str, object] = json.loads(
        subprocess.check_output(command, env=child_environment(), text=True)
    )
    return found


def test_what_a_container_forbids_is_off_and_every_act_is_then_possible(
    in_a_container: dict[str, object],
) -> None:
    """Which shows that the acts fail elsewhere because of the confinement."""
    in_force = {"namespaces": False, "landlock": False, "limits": True, "seccomp": True}
    assert in_a_container["in_force"] == in_force
    assert in_a_container["missing"] == ["namespaces", "landlock"]
    possible = set(in_a_container["possible"])  # type: ignore[call-overload]
    assert {*FILES, *NETWORK, "execute", "signal_server", "change_mode"} <= possible
    assert not possible & RESOURCES
    details = in_a_container["details"]
    assert "seccomp profile forbids Landlock" in details["landlock"]  # type: ignore[index]
    assert "unshare" in details["namespaces"]  # type: ignore[index]


@pytest.mark.skipif(not HAS_NAMESPACES, reason="no namespaces to be had")
def test_a_limit_on_network_namespaces_leaves_the_rest_in_force() -> None:
    inner = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$0" -c "$1"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", inner, sys.executable, REPORT]
    found = json.loads(subprocess.check_output(command, env=child_environment(), text=True))
    assert found["missing"][0] == "namespaces"
    assert found["in_force"]["landlock"] is (landlock_version() > 0)
    assert "send_udp" in found["possible"]
    assert "max_net_namespaces" in found["details"]["namespaces"]


def probe_running(monkeypatch: pytest.MonkeyPatch, script: str) -> ConfinementReport:
    """The report of a probe whose child runs this before its `main`."""
    start = subprocess.Popen
    script = f"from loraplex.adapters import confinement_probe as probe\n{script}\nprobe.main()"
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **options: start([*child.PYTHON, "-c", script], **options),
    )
    return measure_confinement()


def test_a_limit_that_is_not_set_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = (
        "from loraplex.adapters import confinement\nconfinement.limit_resources = lambda limits: 0"
    )
    report = probe_running(monkeypatch, unlimited)
    assert states(report)[Mechanism.LIMITS] is False
    assert {"exceed_memory", "exceed_file_size", "exceed_time"} <= {
        act.act for act in report.possible
    }
    with pytest.raises(ConfinementMissing, match=r"limits \(still possible: exceed_memory"):
        report.check()


@pytest.mark.parametrize("script", ["raise SystemExit(3)", "probe.confine = None"])
def test_what_cannot_be_measured_does_not_count_as_in_force(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = probe_running(monkeypatch, script)
    assert not any(states(report).values())
    assert len(report.missing) == len(confinement_probe.REQUIRED)
    assert "could not be measured" in report.missing[0].detail


CONFINED_SLEEPER = """
import os, sys, time
from loraplex.adapters.confinement import ProcessLimits, confine
limits = ProcessLimits(memory_bytes=1 << 30, cpu_seconds=7, file_bytes=1 << 20)
score = os.open("/proc/self/oom_score_adj", os.O_RDONLY)
confine(limits, read=[], write=[])
print(os.getpid(), os.read(score, 9).decode().strip(), flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
time.sleep(60)
"""


def test_a_confined_child_dies_with_its_server_and_is_the_first_to_go_without_memory() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CONFINED_SLEEPER],
        stdout=subprocess.PIPE,
        env=child_environment(),
        text=True,
    ) as server:
        assert server.stdout is not None
        pid, score = map(int, server.stdout.readline().split())
        assert score == 1000
        os.kill(server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """A zombie that nobody has waited for does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
