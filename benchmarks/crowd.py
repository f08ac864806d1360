"""Many connections to one server: 2,000 streams, 200 slow readers, 10,000 idle connections.

    make soak          or: PYTHONPATH=.src:tests python -m benchmarks.crowd

The real engine serves a tiny model to four tenants. The server starts with the 1,024 open files
that shells allow, as an operator's does. First the streams run alone, then together with the
others. The clients are separate processes (`benchmarks.crowd_member`). Idle connections are silent,
stop in the middle of a head, or stay open after a request; the server closes them in time, and they
reconnect. Slow readers read 16 bytes per second or nothing.

Prints one JSON object; exits with 1 unless

- all streams were open at once and completed, with the correct number of tokens,
- the required number of idle connections was open at any time,
- meanwhile `/health`, `/ready`, a chat request and the admin API always responded,
- a slow reader cost the server no more than a mebibyte,
- the server's open files, threads and tasks return to their initial numbers,
- it exits with 0 on SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from benchmarks.counted_server import TASKS_FILE
from benchmarks.crowd_member import Plan, Seen
from benchmarks.process_memory import MEGABYTE, memory_of

from support.models import make_tiny_llama
from support.server import Caller, ServerUnderTest, child_environment, serving
from support.waiting import wait_for

USUAL_OPEN_FILES = 1024
NUM_TENANTS = 4
STREAM_MEMBERS = 2
PROBE_SECONDS = 1.0
SLOW_SECONDS = 20.0
"""How long slow readers are there before the streams come: their buffers are full by then."""
SLOW_TOKENS = 3000
MAX_SLOW_BYTES = 1 << 20
SPARE = 1.2
"""So many more idle clients than connections that must be open at any time: those that the server
has closed take a while to come again."""
SETTLING_SECONDS = 120.0
FEW = 10
"""So many more open files, threads or tasks than before are none that a client left."""
ROOM = (
    *("--max-num-seqs", "2304", "--max-num-batched-tokens", "4096", "--speculation", "off"),
    *("--max-queued", "8192", "--max-queued-per-tenant", "4096"),
    *("--memory-gib", "3", "--kv-cache-gib", "1", "--max-model-len", "4096"),
)


@dataclass(frozen=True)
class Held:
    """What the server's process holds."""

    files: int
    threads: int
    tasks: int
    rss_megabytes: float

    @classmethod
    def by(cls, server: ServerUnderTest, tasks_file: Path) -> Held:
        pid = server.process.pid
        tasks_file.unlink(missing_ok=True)
        server.process.send_signal(signal.SIGUSR1)
        wait_for(tasks_file.exists)
        return cls(
            files=len(os.listdir(f"/proc/{pid}/fd")),
            threads=len(os.listdir(f"/proc/{pid}/task")),
            tasks=int(tasks_file.read_text()),
            rss_megabytes=round(memory_of(pid).rss / MEGABYTE, 1),
        )

    def is_little_more_than(self, before: Held) -> bool:
        return all(
            getattr(self, name) <= getattr(before, name) + FEW
            for name in ("files", "threads", "tasks")
        )


@dataclass
class Probes:
    """Requests of somebody else beside the crowd."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, object]:
        return {
            name: {
                "answered": len(times),
                "median_seconds": round(statistics.median(times), 3),
                "max_seconds": round(max(times), 3),
            }
            for name, times in self.seconds.items()
        }


class Crowd:
    """Members, each a process."""

    def __init__(self, server: ServerUnderTest, callers: Sequence[Caller], model: str) -> None:
        where = urlsplit(server.url)
        assert where.hostname is not None
        assert where.port is not None
        self._host, self._port, self._model = where.hostname, where.port, model
        self._keys = [caller.key for caller in callers]
        self._num_members = 0

    def send(self, kind: str, num_clients: int, num_tokens: int = 0) -> subprocess.Popen[str]:
        """A process with so many clients; they come now."""
        plan = Plan(
            kind=kind,
            number=self._num_members,
            host=self._host,
            port=self._port,
            num_clients=num_clients,
            keys=self._keys,
            model=self._model,
            num_tokens=num_tokens,
        )
        self._num_members += 1
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.crowd_member", json.dumps(asdict(plan))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )


def wait_until_there(*members: subprocess.Popen[str]) -> None:
    for member in members:
        assert member.stdout is not None
        assert member.stdout.readline() == "all there\n", "a member of the crowd has failed"


def dismiss(*members: subprocess.Popen[str]) -> list[Seen]:
    """What they have seen."""
    for member in members:
        assert member.stdin is not None
        member.stdin.close()
    seen = []
    for member in members:
        assert member.stdout is not None
        seen.append(Seen(**json.loads(member.stdout.readline())))
        member.wait(60)
    return seen


@contextmanager
def probing(server: ServerUnderTest, caller: Caller, operator: str, model: str) -> Iterator[Probes]:
    """Ask one after another, once a second, until the block is left."""
    probes, is_over = Probes(), threading.Event()
    chat = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    requests: Mapping[str, tuple[str, str, str, object]] = {
        "health": ("GET", "/health", caller.key, None),
        "ready": ("GET", "/ready", caller.key, None),
        "chat": ("POST", "/v1/chat/completions", caller.key, chat),
        "adapters": ("GET", "/v1/adapters", caller.key, None),
        "overview": ("GET", "/admin/overview", operator, None),
        "live requests": ("GET", "/admin/requests/live", operator, None),
    }

    def probe() -> None:
        while not is_over.is_set():
            for name, (method, path, key, body) in requests.items():
                begun_at = time.monotonic()
                try:
                    answer = httpx.request(
                        method,
                        server.url + path,
                        headers={"authorization": f"Bearer {key}"},
                        json=body,
                        timeout=60.0,
                    )
                    answer.raise_for_status()
                except httpx.HTTPError as exc:
                    probes.failed[f"{name}: {exc!r}"] += 1
                else:
                    seconds = time.monotonic() - begun_at
                    probes.seconds.setdefault(name, []).append(seconds)
            is_over.wait(PROBE_SECONDS)

    prober = threading.Thread(target=probe)
    prober.start()
    try:
        yield probes
    finally:
        is_over.set()
        prober.join()


@dataclass
class Round:
    """What the streams have seen, all members together."""

    outcomes: Counter[str]
    open_at_once: int
    seconds: float
    seconds_per_token: list[float]
    first_token_seconds: list[float]

    def summary(self) -> dict[str, object]:
        return {
            "outcomes": self.outcomes,
            "open_at_once": self.open_at_once,
            "seconds": round(self.seconds, 1),
            "milliseconds_per_token": _spread(each * 1e3 for each in self.seconds_per_token),
            "first_token_seconds": _spread(self.first_token_seconds),
        }


def _spread(values: Iterator[float] | Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    parts = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    return {
        name: round(ordered[min(int(part * len(ordered)), len(ordered) - 1)], 2)
        for name, part in parts.items()
    }


def stream_round(crowd: Crowd, num_streams: int, num_tokens: int) -> Round:
    begun_at = time.monotonic()
    members = [
        crowd.send("streams", num_streams // STREAM_MEMBERS, num_tokens)
        for _ in range(STREAM_MEMBERS)
    ]
    wait_until_there(*members)
    seen = dismiss(*members)
    return Round(
        outcomes=sum((Counter(each.outcomes) for each in seen), Counter[str]()),
        open_at_once=sum(each.most_open for each in seen),
        seconds=time.monotonic() - begun_at,
        seconds_per_token=[value for each in seen for value in each.seconds_per_token],
        first_token_seconds=[value for each in seen for value in each.first_token_seconds],
    )


@dataclass
class Findings:
    """What was seen from outside and inside."""

    rounds: dict[str, Round] = field(default_factory=dict)
    """Of streams, by who else was there."""
    held: dict[str, Held] = field(default_factory=dict)
    """By when it was looked at, in order."""
    probes: Probes = field(default_factory=Probes)
    idle: Seen = field(default_factory=Seen)
    exit_code: int = 0

    def bytes_between(self, before: str, after: str) -> float:
        """By how much the server's process grew."""
        return (self.held[after].rss_megabytes - self.held[before].rss_megabytes) * MEGABYTE


class Soak:
    """One server, and everybody who comes to it."""

    def __init__(self, server: ServerUnderTest, tasks_file: Path, model: str) -> None:
        tenants = [server.make_caller(f"tenant-{number}") for number in range(NUM_TENANTS)]
        self._server = server
        self._tasks_file = tasks_file
        self._model = model
        self._crowd = Crowd(server, tenants, model)
        self._visitor = server.make_caller("visitor")
        self._operator = server.make_operator("root")
        self.findings = Findings()

    def run(self, options: argparse.Namespace) -> None:
        with self._probing():
            time.sleep(3 * PROBE_SECONDS)  # everything has been used once
        time.sleep(PROBE_SECONDS)
        self._look("before")
        self._let_stream("alone", options)
        self._wait_until_settled("after_streams_alone")
        with self._probing() as self.findings.probes:
            idle = self._crowd.send("idle", round(SPARE * options.idle))
            wait_until_there(idle)
            wait_for(lambda: self._held().files > options.idle, seconds=120)
            self._look("with_idle")
            slow = self._crowd.send("slow", options.slow, SLOW_TOKENS)
            wait_until_there(slow)
            time.sleep(SLOW_SECONDS)
            self._look("with_slow")
            self._let_stream("beside_all", options)
            self._look("as_streams_end")
            self.findings.idle, _ = dismiss(idle, slow)
        self._wait_until_settled("after")
        self._server.process.send_signal(signal.SIGTERM)
        self.findings.exit_code = self._server.process.wait(120)

    def _probing(self) -> AbstractContextManager[Probes]:
        return probing(self._server, self._visitor, self._operator, self._model)

    def _let_stream(self, when: str, options: argparse.Namespace) -> None:
        seen = stream_round(self._crowd, options.streams, options.tokens)
        self.findings.rounds[when] = seen
        note(f"streams {when}", seen.summary())

    def _held(self) -> Held:
        return Held.by(self._server, self._tasks_file)

    def _look(self, when: str) -> None:
        self.findings.held[when] = self._held()
        note(when, self.findings.held[when])

    def _wait_until_settled(self, when: str) -> None:
        """Until as little is held as before, or it has not become so in time."""
        before, end = self.findings.held["before"], time.monotonic() + SETTLING_SECONDS
        while time.monotonic() < end and not self._held().is_little_more_than(before):
            time.sleep(1)
        self._look(when)


def soak(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    base = make_tiny_llama(home / "base", max_position_embeddings=4096)
    tasks_file = home / "tasks"
    program = (sys.executable, "-m", "benchmarks.counted_server")
    environment = {TASKS_FILE: str(tasks_file)}
    with serving(base, home / "data", *ROOM, program=program, **environment) as server:
        soak = Soak(server, tasks_file, base.name)
        soak.run(options)
    found = soak.findings
    bytes_of_slow = found.bytes_between("with_idle", "with_slow") / options.slow
    bytes_of_idle = found.bytes_between("after_streams_alone", "with_idle") / options.idle
    return {
        "violations": list(violations(found, options, bytes_of_slow)),
        "exit_code": found.exit_code,
        "streams": {when: seen.summary() for when, seen in found.rounds.items()},
        "idle": {"least_open": found.idle.least_open, "outcomes": found.idle.outcomes},
        "slow_readers": options.slow,
        "bytes_of_slow_reader": round(bytes_of_slow),
        "bytes_of_idle_connection": round(bytes_of_idle),
        "probes": found.probes.summary(),
        "held": {when: asdict(each) for when, each in found.held.items()},
    }


def violations(
    found: Findings, options: argparse.Namespace, bytes_of_slow_reader: float
) -> Iterator[str]:
    """What did not hold."""
    for when, seen in found.rounds.items():
        for outcome, number in seen.outcomes.items():
            if outcome != "whole":
                yield f"{when}: {number} streams {outcome}"
        if seen.open_at_once < options.streams:
            yield f"{when}: only {seen.open_at_once} streams were open at once"
    for failure, number in found.probes.failed.items():
        yield f"{failure} ({number} times)"
    for outcome, number in found.idle.outcomes.items():
        if outcome.startswith("no connection"):
            yield f"idle: {outcome} ({number} times)"
    if found.idle.least_open < options.idle:
        yield f"only {found.idle.least_open} idle connections were open at once"
    if bytes_of_slow_reader > MAX_SLOW_BYTES:
        yield f"a slow reader costs {bytes_of_slow_reader:.0f} bytes"
    if not found.held["after"].is_little_more_than(found.held["before"]):
        yield f"left behind: {found.held['after']}, before {found.held['before']}"
    if found.exit_code:
        yield f"the server exited with {found.exit_code}"


def note(what: str, figures: object) -> None:
    print(f"{what}: {figures}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--slow", type=int, default=200)
    parser.add_argument("--idle", type=int, default=10_000, help="open at any time")
    parser.add_argument("--tokens", type=int, default=100, help="of a stream")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (USUAL_OPEN_FILES, hard))
    with tempfile.TemporaryDirectory() as home:
        figures = soak(options, Path(home))
    for violation in figures["violations"]:
        print(violation, file=sys.stderr)
    print(json.dumps(figures))
    return 1 if figures["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
