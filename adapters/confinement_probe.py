"""Measures which parts of the intake child's confinement are active on this machine.

`measure_confinement` starts a child in the same way as an examination. The child confines itself,
then attempts what must fail. A mechanism is active if it was available and every action that it
must prevent failed.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy  # noqa: F401  # as in an examination: confinement lets its folders be read

from .child import start_child
from .confinement import MAX_OPEN_FILES, Mechanism, ProcessLimits, confine
from .errors import ConfinementMissing

WALL_SECONDS = 60.0
REQUIRED = (Mechanism.NAMESPACES, Mechanism.LANDLOCK, Mechanism.LIMITS)
"""The mechanisms that `--require-confinement` requires; seccomp is left to the container."""

_LIMITS = ProcessLimits(memory_bytes=1 << 30, cpu_seconds=30, file_bytes=1 << 20)
_EXECUTED = 77

_PREVENTS: Mapping[Mechanism, tuple[str, ...]] = {
    Mechanism.NAMESPACES: ("connect_tcp", "send_udp", "connect_abstract_socket"),
    Mechanism.LANDLOCK: ("read_file", "write_file", "list_folder", "read_server_environment"),
    Mechanism.LIMITS: ("exceed_memory", "exceed_file_size", "exceed_open_files", "exceed_time"),
}
_WHY_POSSIBLE = {
    "fork": "the process limit does not apply to root: run the server as another user",
    "execute": "only Landlock prevents it",
    "change_mode": "Landlock does not cover the modes of files; a seccomp filter could",
    "connect_unix_socket": "Landlock does not cover sockets in the file system; the sockets' own "
    "modes decide",
    "signal_server": "Landlock prevents it from Linux 6.12 on",
    "truncate_file": "Landlock prevents it from Linux 6.2 on",
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MechanismState:
    """Whether one mechanism is in force."""

    name: Mechanism
    is_in_force: bool
    detail: str
    """Why the mechanism is inactive and what to do, or what was measured."""


@dataclass(frozen=True, slots=True)
class PossibleAct:
    """An action that the confined process can perform although it should not."""

    act: str
    reason: str


@dataclass(frozen=True, slots=True)
class ConfinementReport:
    """The confinement of examinations on this machine."""

    mechanisms: tuple[MechanismState, ...]
    possible: tuple[PossibleAct, ...]

    @property
    def missing(self) -> list[MechanismState]:
        """The mechanisms that `--require-confinement` requires and that are inactive."""
        required = (state for state in self.mechanisms if state.name in REQUIRED)
        return [state for state in required if not state.is_in_force]

    def check(self) -> None:
        """Raises ConfinementMissing if something that `--require-confinement` asks for is."""
        if self.missing:
            lacking = "; ".join(f"{state.name} ({state.detail})" for state in self.missing)
            raise ConfinementMissing(
                f"adapters would be examined without {lacking}. Fix this, or serve without "
                "--require-confinement."
            )


@dataclass(frozen=True, slots=True)
class _Targets:
    """The child's input, and the targets that it tries to reach. All paths are absolute."""

    input_path: str
    output_path: str
    outside: str
    """A folder with a file `secret` and a listening socket `socket`."""
    tcp_port: int
    udp_port: int
    abstract_name: str
    server_pid: int


def measure_confinement() -> ConfinementReport:
    """Start a child that confines itself and attempts what must fail; takes about 0.3 s.

    If it cannot be measured, every mechanism counts as inactive.
    """
    try:
        return _judge(_run_probe())
    except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError) as exc:
        _log.warning("confinement_probe_failed", exc_info=True)
        detail = f"it could not be measured: {exc}"
        return ConfinementReport(
            tuple(MechanismState(mechanism, False, detail) for mechanism in Mechanism), ()
        )


def _run_probe() -> dict[str, Any]:
    """The child's answer."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loraplex-probe-")))
        question, answer, log = (
            stack.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(3)
        )
        question.write(json.dumps(asdict(_prepare(folder, stack))).encode())
        question.seek(0)
        child = start_child(__name__, stdin=question, stdout=answer, stderr=log)
        try:
            status = child.wait(WALL_SECONDS)
        finally:
            child.kill()
            child.wait()
        answer.seek(0)
        log.seek(0)
        written = answer.read()
        if not written:
            raise ValueError(f"the probe ended with status {status}: {log.read()[-2000:]!r}")
        found: dict[str, Any] = json.loads(written)
        found["acts"]["execute"] = status == _EXECUTED
        return found


def _prepare(folder: Path, stack: ExitStack) -> _Targets:
    """Files and listening sockets that a child without confinement could reach."""
    outside = folder / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (folder / "input").write_bytes(b"input")
    (folder / "output").touch()
    abstract_name = f"loraplex-probe-{os.getpid()}-{folder.name}"
    with_listener = partial(_listener, stack)
    tcp = with_listener(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0))
    udp = with_listener(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0))
    with_listener(socket.AF_UNIX, socket.SOCK_STREAM, str(outside / "socket"))
    if sys.platform == "linux":
        with_listener(socket.AF_UNIX, socket.SOCK_STREAM, f"\0{abstract_name}")
    return _Targets(
        input_path=str(folder / "input"),
        output_path=str(folder / "output"),
        outside=str(outside),
        tcp_port=tcp.getsockname()[1],
        udp_port=udp.getsockname()[1],
        abstract_name=abstract_name,
        server_pid=os.getpid(),
    )


def _listener(
    stack: ExitStack, family: socket.AddressFamily, kind: socket.SocketKind, address: Any
) -> socket.socket:
    listener = stack.enter_context(socket.socket(family, kind))
    listener.bind(address)
    if kind == socket.SOCK_STREAM:
        listener.listen()
    return listener


def _judge(found: dict[str, Any]) -> ConfinementReport:
    possible = [act for act, is_possible in found["acts"].items() if is_possible]
    states = [_state(mechanism, found["refusals"], possible) for mechanism in REQUIRED]
    reasons = {
        act: f"not in force: {state.name}"
        for state in states
        if not state.is_in_force
        for act in _PREVENTS[state.name]
    }
    why = {**_WHY_POSSIBLE, **reasons}
    return ConfinementReport(
        (*states, _seccomp_state(found["seccomp"])),
        tuple(PossibleAct(act, why.get(act, "nothing prevents it here")) for act in possible),
    )


def _state(
    mechanism: Mechanism, refusals: Mapping[str, str], possible: list[str]
) -> MechanismState:
    prevented = _PREVENTS[mechanism]
    failures = [act for act in prevented if act in possible]
    if mechanism in refusals:
        return MechanismState(mechanism, False, refusals[mechanism])
    if failures:
        return MechanismState(mechanism, False, f"still possible: {', '.join(failures)}")
    return MechanismState(mechanism, True, f"prevents {', '.join(prevented)}")


def _seccomp_state(mode: int) -> MechanismState:
    if mode == 2:
        return MechanismState(Mechanism.SECCOMP, True, "a filter of the container or service")
    return MechanismState(
        Mechanism.SECCOMP,
        False,
        "no maintained Python binding makes a filter; a container's or systemd's own may",
    )


# --- in the child -------------------------------------------------------------------------------


def main() -> None:
    """Confine this process, report the possible actions, and try to execute another program."""
    targets = _Targets(**json.load(sys.stdin))
    seccomp = _seccomp_mode()  # before `/proc` is out of reach
    refusals = confine(_LIMITS, read=[Path(targets.input_path)], write=[Path(targets.output_path)])
    Path(targets.input_path).read_bytes()  # the needs of an examination work
    Path(targets.output_path).write_bytes(b"output")
    acts = {name: _is_possible(act) for name, act in _acts(targets).items()}
    json.dump({"seccomp": seccomp, "refusals": dict(refusals), "acts": acts}, sys.stdout)
    sys.stdout.flush()
    try:
        os.execv(sys.executable, [sys.executable, "-S", "-c", f"raise SystemExit({_EXECUTED})"])
    except OSError:
        return


def _seccomp_mode() -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    modes = [line.split()[1] for line in status.splitlines() if line.startswith("Seccomp:")]
    return int(modes[0]) if modes else 0


def _acts(targets: _Targets) -> dict[str, Callable[[], object]]:
    """The actions that must fail; each raises OSError if it does."""
    outside = Path(targets.outside)
    secret = outside / "secret"
    loopback = "127.0.0.1"
    connect = partial(_connect, socket.AF_INET, socket.SOCK_STREAM)
    connect_unix = partial(_connect, socket.AF_UNIX, socket.SOCK_STREAM)
    return {
        "connect_tcp": lambda: connect((loopback, targets.tcp_port)),
        "send_udp": lambda: _send((loopback, targets.udp_port)),
        "connect_abstract_socket": lambda: connect_unix(f"\0{targets.abstract_name}"),
        "connect_unix_socket": lambda: connect_unix(str(outside / "socket")),
        "read_file": secret.read_bytes,
        "write_file": lambda: (outside / "new").write_bytes(b"x"),
        "truncate_file": lambda: os.truncate(secret, 1),
        "list_folder": lambda: os.listdir(outside),
        "change_mode": lambda: secret.chmod(0o644),
        "read_server_environment": Path(f"/proc/{targets.server_pid}/environ").read_bytes,
        "signal_server": lambda: os.kill(targets.server_pid, 0),
        "exceed_memory": lambda: mmap.mmap(-1, _LIMITS.memory_bytes).close(),
        "exceed_file_size": lambda: os.truncate(targets.output_path, _LIMITS.file_bytes + 1),
        "exceed_open_files": _open_too_many,
        "exceed_time": lambda: _check_limit(resource.RLIMIT_CPU, _LIMITS.cpu_seconds + 1),
        "fork": _fork,
    }


def _is_possible(act: Callable[[], object]) -> bool:
    try:
        act()
    except OSError:
        return False
    return True


def _connect(family: socket.AddressFamily, kind: socket.SocketKind, address: Any) -> None:
    with socket.socket(family, kind) as connection:
        connection.settimeout(1.0)
        connection.connect(address)


def _send(address: tuple[str, int]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"x", address)


def _open_too_many() -> None:
    with ExitStack() as stack:
        for _ in range(MAX_OPEN_FILES):
            stack.callback(os.close, os.dup(0))


def _check_limit(kind: int, most: int) -> None:
    """Raises OSError if the hard limit is at most this."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY and hard <= most:
        raise OSError("the limit is set")


def _fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()
