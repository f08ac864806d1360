from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

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


class NeverSilent:
    """A socket on which the next message is there before the last one was read."""

    num_left = 100_000

    async def recv_multipart(self) -> tuple[bytes, bytes]:
        self.num_left -= 1
        if not self.num_left:
            raise EOFError
        return encode(StepEvents())


class ShortLived:
    async def wait(self) -> int:
        await asyncio.sleep(0.01)
        return 7

    def kill(self) -> None:
        """The end of its messages ends it too, too late."""


def test_a_process_that_never_falls_silent_does_not_hold_up_the_loop(tmp_path: Path) -> None:
    async def scenario() -> None:
        socket = NeverSilent()
        process = EngineProcess(
            cast(Any, ShortLived()),
            cast(Any, socket),
            Heartbeat(tmp_path / "heartbeat"),
            ExitStack(),
        )
        messages: list[FromEngine] = []
        assert await process.run(messages.append) == 7
        assert messages
        assert socket.num_left > 0

    asyncio.run(scenario())
