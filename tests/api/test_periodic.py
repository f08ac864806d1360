"""Work that repeats beside the requests: no failure ends it, and closing does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from loraplex.api.control_plane.background_loop import BackgroundLoop
from loraplex.api.control_plane.periodic import Periodic
from loraplex.platform.errors import DatabaseUnavailable

LONG = 3600.0


class Work:
    """Counts its rounds; each raises what the test has put down for it."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.num_rounds = 0

    async def __call__(self) -> None:
        self.num_rounds += 1
        if self.failures:
            raise self.failures.pop(0)

    async def rounds(self, number: int) -> None:
        async with asyncio.timeout(10):
            while self.num_rounds < number:
                await asyncio.sleep(0.001)


def make_periodic(
    work: Callable[[], Awaitable[object]], seconds: float = 0.001, **options: Any
) -> Periodic:
    log = structlog.get_logger("a_service").bind(job="sweep")
    return Periodic(work, seconds=seconds, log=log, failed="not_done", **options)


def test_rounds_follow_each_other_until_it_is_closed() -> None:
    async def scenario() -> None:
        work = Work()
        loop = make_periodic(work)
        loop.start()
        await work.rounds(3)
        await loop.close()
        num_rounds = work.num_rounds
        await asyncio.sleep(0.02)
        assert work.num_rounds == num_rounds

    asyncio.run(scenario())


def test_a_failure_is_logged_and_the_next_round_comes() -> None:
    async def scenario() -> None:
        work = Work(DatabaseUnavailable(), KeyError("bug"), OSError("full"))
        loop = make_periodic(work, delayed="put_off")
        loop.start()
        await work.rounds(4)
        await loop.close()

    with capture_logs() as logs:
        asyncio.run(scenario())
    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("put_off", "warning"),
        ("not_done", "error"),
        ("not_done", "error"),
    ]
    assert logs[0]["error"] == str(DatabaseUnavailable())
    assert "exc_info" not in logs[0]
    assert logs[1]["exc_info"] is True
    assert all(line["job"] == "sweep" for line in logs)


def test_the_service_says_which_failures_pass_by_themselves() -> None:
    async def scenario() -> None:
        work = Work(OSError("full"), DatabaseUnavailable())
        loop = make_periodic(work, delayed_by=OSError)
        loop.start()
        await work.rounds(3)
        await loop.close()

    with capture_logs() as logs:
        asyncio.run(scenario())
    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("not_done", "warning"),
        ("not_done", "error"),
    ]


def test_the_first_round_waits_too_unless_it_is_to_come_at_once() -> None:
    async def scenario() -> None:
        waiting, at_once = Work(), Work()
        loops = make_periodic(waiting, LONG), make_periodic(at_once, LONG, at_once=True)
        for loop in loops:
            loop.start()
        await at_once.rounds(1)
        await asyncio.sleep(0.02)
        assert (waiting.num_rounds, at_once.num_rounds) == (0, 1)
        for loop in loops:
            await loop.close()

    asyncio.run(scenario())


def test_a_round_begins_when_it_is_woken_and_once_for_all_wakes_of_the_round_before() -> None:
    async def scenario() -> None:
        work = Work()
        loop = make_periodic(work, LONG)
        loop.wake()  # not started: without effect
        loop.start()
        await asyncio.sleep(0.02)
        assert work.num_rounds == 0
        await asyncio.to_thread(loop.wake)
        await work.rounds(1)
        for _ in range(3):
            loop.wake()
        await work.rounds(2)
        await asyncio.sleep(0.02)
        assert work.num_rounds == 2
        await loop.close()
        loop.wake()
        await asyncio.sleep(0.02)
        assert work.num_rounds == 2

    asyncio.run(scenario())


def test_a_wake_during_a_round_is_not_lost() -> None:
    async def scenario() -> None:
        num_rounds = 0

        async def wake_once() -> None:
            nonlocal num_rounds
            num_rounds += 1
            if num_rounds == 1:
                loop.wake()

        loop = make_periodic(wake_once, LONG, at_once=True)
        loop.start()
        async with asyncio.timeout(10):
            while num_rounds < 2:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert num_rounds == 2
        await loop.close()

    asyncio.run(scenario())


def test_rounds_by_the_clock_begin_at_multiples_of_the_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = time.monotonic()
    monkeypatch.setattr(time, "time", lambda: 3 * LONG - 0.1 + time.monotonic() - begun)

    async def scenario() -> None:
        work = Work()
        loop = make_periodic(work, LONG, by_clock=True)
        loop.start()
        await work.rounds(1)
        assert time.monotonic() - begun >= 0.1
        await asyncio.sleep(0.02)
        assert work.num_rounds == 1
        await loop.close()

    asyncio.run(scenario())


def test_closing_cancels_the_round_under_way_and_waits_for_its_end() -> None:
    async def scenario() -> None:
        is_working, is_cleared = asyncio.Event(), False

        async def hang() -> None:
            nonlocal is_cleared
            is_working.set()
            try:
                await asyncio.sleep(LONG)
            finally:
                await asyncio.sleep(0.01)
                is_cleared = True

        loop = make_periodic(hang)
        loop.start()
        await is_working.wait()
        await loop.close()
        assert is_cleared

    asyncio.run(scenario())


def test_a_loop_that_was_never_started_or_has_failed_is_closed_in_peace() -> None:
    async def fail() -> None:
        raise KeyError("bug")

    async def scenario() -> None:
        loop = BackgroundLoop(fail)
        await loop.close()
        assert not loop.is_started
        loop.start()
        await asyncio.sleep(0)
        await loop.close()
        assert loop.is_started

    asyncio.run(scenario())
