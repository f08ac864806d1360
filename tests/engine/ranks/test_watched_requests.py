"""Requests that hang are told from those that wait, however slow the machine is."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from loraplex.engine.messages import FinishReason, RequestFinished, TokensGenerated
from loraplex.engine.process.client import EngineClient
from support import command_kills
from support.command_kills import HANG_SECONDS, Watched, num_hanging

CLIENT = cast(EngineClient, SimpleNamespace(is_ready=True))
NUM_TOKENS = 4


class Clock:
    """Time passes when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    async def advance(self, seconds: float) -> None:
        """Let the seconds pass; the watch looks at the requests afterwards."""
        self.now += seconds
        await asyncio.sleep(0.2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(command_kills, "time", clock)
    return clock


def finished(name: str) -> RequestFinished:
    return RequestFinished(name, FinishReason.LENGTH, num_prompt_tokens=1, num_generated_tokens=1)


@pytest.mark.parametrize(("ends", "expected"), [(True, 0), (False, 1)])
def test_a_silent_request_hangs_only_if_it_is_left_when_all_others_have_ended(
    clock: Clock, ends: bool, expected: int
) -> None:
    async def watch() -> int:
        running, waiting = Watched(NUM_TOKENS), Watched(0)
        count = asyncio.create_task(num_hanging(CLIENT, [running, waiting]))
        for token in range(NUM_TOKENS):
            await clock.advance(0.9 * HANG_SECONDS)
            running.take(TokensGenerated("running", [token]))
        running.take(finished("running"))
        await clock.advance(0.9 * HANG_SECONDS)
        assert not count.done(), "it may have waited for the one that has ended"
        if ends:
            waiting.take(finished("waiting"))
        await clock.advance(0.2 * HANG_SECONDS)
        return await count

    assert asyncio.run(watch()) == expected
