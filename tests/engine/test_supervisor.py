from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from loraplex.engine.errors import MalformedMessage
from loraplex.engine.heartbeat import Heartbeat
from loraplex.engine.messages import FromEngine, StepEvents
from loraplex.engine.process import engine_process
from loraplex.engine.process.engine_process import EngineProcess, engine_environment
from loraplex.engine.process.engine_socket import EngineSocket
from loraplex.engine.process.frames import FrameReader, Frames, pack
from loraplex.engine.process.supervisor import RestartPolicy
from loraplex.engine.process.transport import encode


def test_delays_double_up_to_the_longest() -> None:
    policy = RestartPolicy()
    delays = [policy.next_delay(now=100.0 * n, lived_seconds=20.0) for n in range(8)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_long_life_begins_the_delays_anew() -> None:
    policy = RestartPolicy()
    assert policy.next_delay(now=0.0, lived_seconds=1.0) == 0.5
    assert policy.next_delay(now=100.0, lived_seconds=59.0) == 1.0
    assert policy.next_delay(now=200.0, lived_seconds=60.0) == 0.5


@pytest.mark.parametrize(("last", "expected"), [(59.9, None), (60.0, 8.0)])
def test_five_deaths_within_a_minute_are_the_last(last: float, expected: float | None) -> None:
    policy = RestartPolicy()
    for now in (0.0, 1.0, 2.0, 3.0):
        assert policy.next_delay(now=now, lived_seconds=0.0) is not None
    assert policy.next_delay(now=last, lived_seconds=0.0) == expected


def test_the_engines_environment_has_no_credentials() -> None:
    environment = {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "1",
        "HF_HOME": "/models",
        "LRU_CACHE_CAPACITY": "64",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "LORAPLEX_DATABASE": "postgresql://user:secret@host",
        "OPENAI_API_KEY": "secret",
        "PYTHONSTARTUP": "/secret.py",
    }
    passed = engine_environment(environment)
    wanted = {"PATH", "CUDA_VISIBLE_DEVICES", "HF_HOME", "LRU_CACHE_CAPACITY", "PYTHONPATH"}
    assert passed.keys() == {*wanted, "GLIBC_TUNABLES"}


def test_the_operators_environment_takes_precedence() -> None:
    assert engine_environment({})["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    tunables = "glibc.malloc.hugetlb=0"
    assert engine_environment({"GLIBC_TUNABLES": tunables})["GLIBC_TUNABLES"] == tunables


class ShortLived:
    async def wait(self) -> int:
        await asyncio.sleep(0.01)
        return 7

    def kill(self) -> None:
        """The end of its messages ends it too, too late."""


Sockets = tuple[socket.socket, socket.socket]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """The two ends of a connection."""
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def process_of(near: socket.socket, home: Path) -> EngineProcess:
    return EngineProcess(
        cast(Any, ShortLived()), EngineSocket(near), Heartbeat(home / "heartbeat"), ExitStack()
    )


def test_a_process_that_never_falls_silent_does_not_hold_up_the_loop(
    sockets: Sockets, tmp_path: Path
) -> None:
    near, far = sockets

    async def scenario() -> None:
        messages: list[FromEngine] = []

        def take(message: FromEngine) -> None:
            messages.append(message)
            far.sendall(pack(encode(StepEvents())))  # the next is there before this one is over

        far.sendall(pack(encode(StepEvents())))
        assert await process_of(near, tmp_path).run(take) == 7
        assert len(messages) > 1

    asyncio.run(scenario())


LOOPS = pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def run(scenario: Coroutine[Any, Any, None], loop_factory: LoopFactory) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.wait_for(scenario, timeout=20))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def ignore_the_end(_: MalformedMessage | None) -> None:
    """The peer stays."""


@LOOPS
def test_nothing_is_overheard_while_it_is_spoken_to(
    sockets: Sockets, loop_factory: LoopFactory
) -> None:
    near, far = sockets

    async def scenario() -> None:
        taken: list[bytes] = []
        engine = EngineSocket(near)
        engine.listen(lambda frames: taken.append(frames[0]), ignore_the_end)
        for number in range(20):
            name = b"%d" % number
            far.sendall(pack([name, b""]))
            assert engine.send([name, b"x" * number])
            await until(lambda: len(taken) > number)  # noqa: B023
        assert taken == [b"%d" % number for number in range(20)]
        received = FrameReader()
        received.add(far.recv(1 << 16))
        assert [received.next() for _ in taken] == [
            (name, b"x" * number) for number, name in enumerate(taken)
        ]
        engine.close()
        engine.close()
        assert not engine.send([b"late", b""])

    run(scenario(), loop_factory)


@LOOPS
def test_messages_may_come_in_any_parts_and_many_at_once(
    sockets: Sockets, loop_factory: LoopFactory
) -> None:
    near, far = sockets
    messages = [(b"name-%d" % size, b"x" * size) for size in (0, 1, 100_000, 7, 300_000)]
    sent = b"".join(map(pack, messages))

    async def scenario() -> None:
        taken: list[Frames] = []
        engine = EngineSocket(near)
        engine.listen(taken.append, ignore_the_end)
        far.setblocking(False)
        loop = asyncio.get_running_loop()
        for part_bytes in (50_021, len(sent)):
            taken.clear()
            for begin in range(0, len(sent), part_bytes):
                await loop.sock_sendall(far, sent[begin : begin + part_bytes])
            await until(lambda: len(taken) == len(messages))
            assert taken == messages
        engine.close()

    run(scenario(), loop_factory)


@LOOPS
def test_who_listens_late_is_sent_everything_in_order(
    sockets: Sockets, loop_factory: LoopFactory
) -> None:
    near, far = sockets
    messages = [(b"%d" % number, b"x" * 50_000) for number in range(40)]

    async def scenario() -> None:
        engine = EngineSocket(near)
        engine.listen(lambda frames: None, ignore_the_end)
        for frames in messages:  # far more than the system keeps
            assert engine.send(frames)
        far.setblocking(False)
        loop, received = asyncio.get_running_loop(), FrameReader()
        taken: list[Frames] = []
        while len(taken) < len(messages):
            received.add(await loop.sock_recv(far, 1 << 16))
            while (message := received.next()) is not None:
                taken.append(message)
        assert taken == messages
        engine.close()

    run(scenario(), loop_factory)


@LOOPS
def test_what_a_peer_said_last_is_heard_by_who_could_not_answer(
    sockets: Sockets, loop_factory: LoopFactory
) -> None:
    near, far = sockets
    last = [(b"%d" % number, b"x" * 1000) for number in range(50)]

    async def scenario() -> None:
        taken: list[Frames] = []
        ends: list[tuple[MalformedMessage | None, int]] = []
        engine = EngineSocket(near)
        engine.listen(taken.append, lambda error: ends.append((error, len(taken))))
        for frames in last:
            far.sendall(pack(frames))
        far.close()
        assert not engine.send([b"nobody", b"hears it"])
        await until(lambda: bool(ends))
        assert taken == last
        assert ends == [(None, len(last))]  # told once, after the last message
        assert not engine.send([b"still", b"nobody"])
        engine.close()

    run(scenario(), loop_factory)


@LOOPS
def test_a_length_beyond_its_bound_ends_what_is_heard_after_the_messages_before_it(
    sockets: Sockets, loop_factory: LoopFactory
) -> None:
    near, far = sockets

    async def scenario() -> None:
        taken: list[Frames] = []
        ends: list[MalformedMessage | None] = []
        engine = EngineSocket(near)
        engine.listen(taken.append, ends.append)
        far.sendall(pack((b"a", b"1")) + pack((b"b", b"2")) + b"\xff" * 8 + pack((b"c", b"3")))
        await until(lambda: bool(ends))
        assert taken == [(b"a", b"1"), (b"b", b"2")]
        assert [type(error) for error in ends] == [MalformedMessage]
        engine.close()

    run(scenario(), loop_factory)


@LOOPS
def test_who_has_closed_is_not_told_of_the_end(sockets: Sockets, loop_factory: LoopFactory) -> None:
    near, far = sockets

    async def scenario() -> None:
        ends: list[MalformedMessage | None] = []
        engine = EngineSocket(near)
        engine.listen(lambda frames: None, ends.append)
        far.close()
        engine.close()
        for _ in range(20):
            await asyncio.sleep(0)
        assert ends == []

    run(scenario(), loop_factory)


class Deaf(ShortLived):
    """Has closed its socket, and ends only when it is killed."""

    def __init__(self) -> None:
        self._killed = asyncio.Event()

    async def wait(self) -> int:
        await self._killed.wait()
        return -9

    def kill(self) -> None:
        self._killed.set()


@pytest.mark.parametrize("last_words", [b"", b"\xff" * 8])
def test_a_process_that_can_no_longer_be_heard_is_killed(
    sockets: Sockets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_words: bytes
) -> None:
    near, far = sockets
    monkeypatch.setattr(engine_process, "STOP_SECONDS", 0.05)

    async def scenario() -> None:
        beats = Heartbeat(tmp_path / "heartbeat")
        process = EngineProcess(cast(Any, Deaf()), EngineSocket(near), beats, ExitStack())
        far.sendall(last_words)
        far.close()
        assert await process.run(lambda message: None) == -9

    run(scenario(), asyncio.new_event_loop)
