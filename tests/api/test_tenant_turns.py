"""The event loop's access to threads that tenants share fairly."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from loraplex.api.contract.errors import ApiError
from loraplex.api.control_plane.tenant_threads import AsyncTenantThreads


@pytest.fixture
def turns() -> Iterator[AsyncTenantThreads]:
    pool = AsyncTenantThreads("turns", 2, max_calls=20)
    yield pool
    pool.close()


class Gate:
    """A call that lasts until it is let go, and notes when it begins."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self._opened = threading.Event()

    def call(self, name: str) -> str:
        self._log.append(name)
        assert self._opened.wait(10)
        return name

    def open(self) -> None:
        self._opened.set()


async def begun(log: list[str], count: int) -> None:
    while len(log) < count:
        await asyncio.sleep(0.001)


def test_a_flood_of_one_tenant_leaves_a_thread_to_the_others(turns: AsyncTenantThreads) -> None:
    async def scenario() -> list[str]:
        log: list[str] = []
        flood, other = Gate(log), Gate(log)
        other.open()
        calls = [asyncio.ensure_future(turns.run("a", flood.call, f"a{i}")) for i in range(20)]
        await begun(log, 1)
        assert await turns.run("b", other.call, "b") == "b"
        flood.open()
        assert await asyncio.gather(*calls) == [f"a{i}" for i in range(20)]
        return log

    log = asyncio.run(scenario())
    assert log == ["a0", "b", *(f"a{i}" for i in range(1, 20))]


def test_whoever_is_cancelled_keeps_the_turn_until_the_thread_is_done(
    turns: AsyncTenantThreads,
) -> None:
    async def scenario() -> None:
        log: list[str] = []
        first, second = Gate(log), Gate(log)
        second.open()
        call = asyncio.ensure_future(turns.run("a", first.call, "first"))
        await begun(log, 1)
        call.cancel()
        waiting = asyncio.ensure_future(turns.run("a", second.call, "second"))
        left = asyncio.ensure_future(turns.run("a", second.call, "left"))
        left.cancel()
        await asyncio.sleep(0.02)
        assert log == ["first"], "no more than one call of a tenant runs"
        first.open()
        assert await waiting == "second"
        await asyncio.sleep(0.02)
        assert log == ["first", "second"], "who left the line is not run"

    asyncio.run(scenario())


def test_a_line_is_bounded_and_an_error_ends_its_turn() -> None:
    turns = AsyncTenantThreads("turns", 2, max_calls=2)

    async def scenario() -> None:
        for _ in range(2):
            log: list[str] = []
            gate = Gate(log)
            calls = [asyncio.ensure_future(turns.run("a", gate.call, name)) for name in "xy"]
            await begun(log, 1)
            with pytest.raises(ApiError) as refusal:
                await turns.run("a", gate.call, "z")
            assert refusal.value.code == "tenant_queue_full"
            gate.open()
            await asyncio.gather(*calls)
            assert not turns._num_calls, "nothing is kept of who has no calls"
        with pytest.raises(ZeroDivisionError):
            await turns.run("a", lambda: 1 // 0)
        assert await turns.run("a", gate.call, "after") == "after"

    asyncio.run(scenario())
    turns.close()
