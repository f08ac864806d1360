from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
import zmq

from loraplex.engine.engine_socket import EngineSocket
from loraplex.engine.heartbeat import Heartbeat
from loraplex.engine.messages import FromEngine, StepEvents
from loraplex.engine.supervisor import EngineProcess, RestartPolicy, engine_environment
from loraplex.engine.transport import encode


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
        "AWS_SECRET_ACCESS_KEY": "secret",
        "LORAPLEX_DATABASE": "postgresql://user:secret@host",
        "OPENAI_API_KEY": "secret",
        "PYTHONSTARTUP": "/secret.py",
    }
    passed = engine_environment(environment)
    assert passed.keys() == {"PATH", "CUDA_VISIBLE_DEVICES", "HF_HOME", "PYTHONPATH"}


class ShortLived:
    async def wait(self) -> int:
        await asyncio.sleep(0.01)
        return 7

    def kill(self) -> None:
        """The end of its messages ends it too, too late."""


Sockets = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """The two ends of a connection."""
    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as near,
        context.socket(zmq.PAIR) as far,
    ):
        for socket in (near, far):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
        near.bind("inproc://engine")
        far.connect("inproc://engine")
        yield near, far


def process_of(socket: zmq.Socket[bytes], home: Path) -> EngineProcess:
    return EngineProcess(
        cast(Any, ShortLived()), EngineSocket(socket), Heartbeat(home / "heartbeat"), ExitStack()
    )


def test_a_process_that_never_falls_silent_does_not_hold_up_the_loop(
    sockets: Sockets, tmp_path: Path
) -> None:
    near, far = sockets

    async def scenario() -> None:
        messages: list[FromEngine] = []

        def take(message: FromEngine) -> None:
            messages.append(message)
            far.send_multipart(encode(StepEvents()))  # the next is there before this one is over

        far.send_multipart(encode(StepEvents()))
        assert await process_of(near, tmp_path).run(take) == 7
        assert len(messages) > 1

    asyncio.run(scenario())


class Parting:
    """The end of a socket whose peer leaves: what it said last is found by a send that fails, and
    the descriptor says nothing of it any more.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._last: list[list[bytes]] = []

    def fileno(self) -> int:
        return self._descriptor

    def send_multipart(self, frames: object, flags: int) -> None:
        self._last = [[b"last", b""]]
        raise zmq.Again

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self._last:
            raise zmq.Again
        return self._last.pop()

    def close(self) -> None: ...


def test_what_a_peer_said_last_is_heard_by_who_could_not_answer() -> None:
    async def scenario() -> None:
        taken: list[bytes] = []
        reading, writing = os.pipe()
        socket = EngineSocket(cast(Any, Parting(reading)))
        socket.listen(lambda frames: taken.append(frames[0]))
        await asyncio.sleep(0.01)  # the first look is over
        assert not socket.send([b"", b""])
        for _ in range(3):
            await asyncio.sleep(0)
        socket.close()
        os.close(reading)
        os.close(writing)
        assert taken == [b"last"]

    asyncio.run(scenario())


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_nothing_is_overheard_while_it_is_spoken_to(
    sockets: Sockets, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    near, far = sockets

    async def scenario() -> None:
        taken: list[bytes] = []
        socket = EngineSocket(near)
        socket.listen(lambda frames: taken.append(frames[0]))
        for number in range(20):
            name = b"%d" % number
            await asyncio.sleep(0.001)  # no look at the last message's successor is due any more
            far.send_multipart([name, b""])
            time.sleep(0.005)  # after so long a send looks for itself at what has come
            assert socket.send([name, b""])
            while len(taken) <= number:
                await asyncio.sleep(0)
        assert taken == [b"%d" % number for number in range(20)]
        assert [far.recv_multipart()[0] for _ in taken] == taken
        socket.close()
        socket.close()
        assert not socket.send([b"late", b""])

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.wait_for(scenario(), timeout=20))
