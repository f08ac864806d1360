from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from loraplex.engine.config import EngineConfig
from loraplex.engine.kv.tier_key import new_tier_key
from loraplex.engine.messages import (
    Abort,
    EngineFailed,
    EngineReady,
    ErrorInfo,
    FinishReason,
    FromEngine,
    GenerationRequest,
    RequestFinished,
    StepEvents,
    Submit,
    ToEngine,
    TokensGenerated,
)
from loraplex.engine.process.frames import FrameReader, Frames, pack
from loraplex.engine.process.transport import decode_from_engine, encode
from loraplex.engine.sampling_params import SamplingParams
from support.fake_engine import FAIL_FILE, HANG, RAISE

TIMEOUT_SECONDS = 60
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class Link:
    """Our end of the socket to an engine."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(TIMEOUT_SECONDS)
        self._socket = connected
        self._received = FrameReader()

    def send(self, frames: Frames) -> None:
        self._socket.sendall(pack(frames))

    def close(self) -> None:
        self._socket.close()

    def receive(self) -> Frames:
        while (frames := self._received.next()) is None:
            data = self._socket.recv(1000)
            assert data, "the engine is gone"
            self._received.add(data)
        return frames


@dataclass
class Engine:
    """A running fake engine, without the client."""

    process: subprocess.Popen[bytes]
    link: Link

    def send(self, message: ToEngine) -> None:
        self.link.send(encode(message))

    def submit(self, request_id: str, prompt: list[int], max_tokens: int = 2) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        self.send(Submit(GenerationRequest(request_id, "acme", prompt, sampling)))

    def receive(self) -> FromEngine:
        return decode_from_engine(self.link.receive())

    def receive_until(self, kind: type[FromEngine]) -> FromEngine:
        while not isinstance(message := self.receive(), kind):
            pass
        return message

    def receive_end(self) -> RequestFinished:
        """The next end of a request."""
        while True:
            message = self.receive()
            if isinstance(message, StepEvents) and message.finished:
                return message.finished[0]

    def wait(self) -> tuple[int, list[str]]:
        """Its exit status and what it has logged."""
        status = self.process.wait(TIMEOUT_SECONDS)
        assert self.process.stderr is not None
        return status, self.process.stderr.read().decode().splitlines()


def linked() -> tuple[Link, socket.socket]:
    """A link, and its other end."""
    ours, theirs = socket.socketpair()
    return Link(ours), theirs


def command(home: Path, descriptor: int) -> list[str]:
    config = msgspec.json.encode(EngineConfig(model=str(home))).decode()
    program = [sys.executable, "-P", "-m", "support.fake_engine"]
    return [*program, str(descriptor), str(home / "heartbeat"), config]


@contextmanager
def running_engine(home: Path) -> Iterator[Engine]:
    pipe = subprocess.PIPE
    link, theirs = linked()
    with subprocess.Popen(
        command(home, theirs.fileno()),
        stdin=pipe,
        stderr=pipe,
        env=ENVIRONMENT,
        pass_fds=[theirs.fileno()],
    ) as process:
        theirs.close()
        assert process.stdin is not None
        os.write(process.stdin.fileno(), new_tier_key())
        try:
            yield Engine(process, link)
        finally:
            process.kill()
            link.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with running_engine(tmp_path) as engine:
        yield engine


def wait_for_end(pid: int) -> None:
    """Wait until a process that is not our child has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    readable, _, _ = select.select([descriptor], [], [], TIMEOUT_SECONDS)
    os.close(descriptor)
    assert readable, "the process is still there"


def test_says_that_it_is_ready_and_serves(engine: Engine) -> None:
    assert isinstance(ready := engine.receive(), EngineReady)
    assert ready.info.model_type == "fake"
    engine.submit("r", [7, 8], max_tokens=3)
    tokens: list[TokensGenerated] = []
    ends: list[RequestFinished] = []
    while not ends:
        message = engine.receive()
        if isinstance(message, StepEvents):
            tokens += message.tokens
            ends += message.finished
    assert [event.token_ids for event in tokens] == [[7], [8], [7]]
    assert [end.reason for end in ends] == [FinishReason.LENGTH]


def test_a_failed_start_is_reported_by_code_and_once(tmp_path: Path) -> None:
    (tmp_path / FAIL_FILE).write_text("no such layer")
    with running_engine(tmp_path) as engine:
        failed = engine.receive()
        status, log = engine.wait()
        assert status == 1
    assert log == [], "the parent reports it"
    assert failed == EngineFailed(ErrorInfo("unsupported_model", "no such layer"))


def test_a_failure_of_the_core_is_reported_and_ends_the_process(engine: Engine) -> None:
    engine.submit("r", RAISE)
    failed = engine.receive_until(EngineFailed)
    assert isinstance(failed, EngineFailed)
    assert failed.error.code == "engine_error"
    assert "the step failed" in failed.error.message
    status, log = engine.wait()
    assert status == 1
    assert json.loads(log[-1])["event"] == "engine_failed"
    assert "RuntimeError" in json.loads(log[-1])["exception"]


def test_a_malformed_message_is_refused_and_the_others_go_on(engine: Engine) -> None:
    engine.receive_until(EngineReady)
    engine.submit("r", HANG)
    engine.link.send([b"Submit", b"\xc1"])
    engine.link.send([b"alone", b""])
    engine.send(Abort("r"))
    assert engine.receive_end().reason is FinishReason.ABORTED
    engine.process.terminate()
    _, log = engine.wait()
    assert [json.loads(line)["event"] for line in log].count("message_refused") == 2


def test_aborts_of_unknown_and_finished_requests_are_ignored(engine: Engine) -> None:
    for _ in range(2):
        engine.send(Abort("never seen"))
        engine.submit("r", [5], max_tokens=1)
        assert engine.receive_end().reason is FinishReason.LENGTH
        engine.send(Abort("r"))


def test_sigterm_ends_it_at_once_and_in_order(engine: Engine) -> None:
    engine.submit("r", HANG)
    engine.receive_until(StepEvents)
    engine.process.terminate()
    assert engine.wait()[0] == 0


def test_an_interrupt_of_the_group_is_left_to_the_parent(engine: Engine) -> None:
    engine.receive_until(EngineReady)
    engine.process.send_signal(signal.SIGINT)
    engine.submit("r", [5], max_tokens=1)
    assert engine.receive_end().reason is FinishReason.LENGTH


def test_ends_when_its_standard_input_does(engine: Engine) -> None:
    engine.receive_until(EngineReady)
    assert engine.process.stdin is not None
    engine.process.stdin.close()
    engine.process.stdin = None
    assert engine.wait()[0] == 0


def test_ends_when_its_socket_does(engine: Engine) -> None:
    engine.receive_until(EngineReady)
    engine.submit("r", HANG)
    engine.link.close()
    assert engine.wait()[0] == 0


def test_sigusr1_dumps_the_stacks_and_leaves_it_running(engine: Engine) -> None:
    engine.receive_until(EngineReady)
    engine.process.send_signal(signal.SIGUSR1)
    engine.submit("r", [5], max_tokens=1)
    assert engine.receive_end().reason is FinishReason.LENGTH
    engine.process.terminate()
    _, log = engine.wait()
    assert any("_serve" in line for line in log)


def test_logs_are_json_lines_without_prompts(engine: Engine) -> None:
    engine.receive_until(EngineReady)
    engine.submit("r", [424242], max_tokens=1)
    engine.receive_end()
    engine.process.terminate()
    _, log = engine.wait()
    records = [json.loads(line) for line in log]
    assert records[0]["event"] == "engine_ready"
    assert records[0]["level"] == "info"
    assert "424242" not in "".join(log)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_dies_with_its_parent_even_if_its_standard_input_stays_open(tmp_path: Path) -> None:
    """As it would where the engine is stuck in native code and no thread of it can run."""
    stdin, held_open = os.pipe()
    os.write(held_open, new_tier_key())
    link, theirs = linked()
    engine = command(tmp_path, theirs.fileno())
    passed = [stdin, theirs.fileno()]
    parent_code = f"""
        import subprocess, sys
        child = subprocess.Popen({engine!r}, stdin={stdin}, pass_fds={passed})
        print(child.pid, flush=True)
        sys.stdin.read()
    """
    with (
        theirs,
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(parent_code)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
            pass_fds=passed,
        ) as parent,
    ):
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        link.receive()  # it is ready
        parent.kill()
        wait_for_end(pid)
    link.close()
    os.close(stdin)
    os.close(held_open)
