"""Thread pools that tenants share fairly."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from loraplex.adapters.tenant_threads import TenantThreads

PATIENCE_SECONDS = 20


@pytest.fixture
def threads() -> Iterator[TenantThreads]:
    pool = TenantThreads("turns", 2)
    yield pool
    pool.close()


class Gate:
    """A call that lasts until it is let go, and notes when it begins."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.begun = threading.Event()
        self.opened = threading.Event()

    def call(self, name: str) -> str:
        self._log.append(name)
        self.begun.set()
        assert self.opened.wait(PATIENCE_SECONDS)
        return name


def test_a_flood_of_one_tenant_leaves_a_thread_to_the_others(threads: TenantThreads) -> None:
    log: list[str] = []
    flood, other = Gate(log), Gate(log)
    other.opened.set()
    calls = [threads.submit("a", flood.call, f"a{index}") for index in range(24)]
    assert flood.begun.wait(PATIENCE_SECONDS)
    for index in range(3):
        assert threads.submit("b", other.call, f"b{index}").result(PATIENCE_SECONDS)
    flood.opened.set()
    assert [call.result(PATIENCE_SECONDS) for call in calls] == [f"a{i}" for i in range(24)]
    assert log == ["a0", "b0", "b1", "b2", *(f"a{index}" for index in range(1, 24))]


def test_errors_are_the_callers_and_what_is_cancelled_before_its_turn_is_not_called(
    threads: TenantThreads,
) -> None:
    log: list[str] = []
    gate = Gate(log)
    running = threads.submit("a", gate.call, "first")
    assert gate.begun.wait(PATIENCE_SECONDS)
    cancelled = threads.submit("a", gate.call, "cancelled")
    failing = threads.submit("a", lambda: 1 // 0)
    after = threads.submit("a", gate.call, "after")
    assert cancelled.cancel()
    assert len(threads._queues) == 2, "nothing is kept of it"
    assert not running.cancel(), "what runs runs to its end"
    gate.opened.set()
    with pytest.raises(ZeroDivisionError):
        failing.result(PATIENCE_SECONDS)
    assert after.result(PATIENCE_SECONDS) == "after"
    assert log == ["first", "after"]


def test_a_tenant_has_no_more_threads_than_it_may() -> None:
    pool = TenantThreads("turns", 4, max_held=1)
    log: list[str] = []
    gate = Gate(log)
    calls = [pool.submit("a", gate.call, name) for name in ("first", "second")]
    assert gate.begun.wait(PATIENCE_SECONDS)
    name = pool.submit("b", lambda: threading.current_thread().name).result(PATIENCE_SECONDS)
    assert name.startswith("turns")
    assert log == ["first"]
    gate.opened.set()
    assert [call.result(PATIENCE_SECONDS) for call in calls] == ["first", "second"]
    pool.close()


def test_closing_lets_what_runs_end_and_cancels_what_waits() -> None:
    pool = TenantThreads("turns", 1)
    gate = Gate([])
    running = pool.submit("a", gate.call, "runs")
    assert gate.begun.wait(PATIENCE_SECONDS)
    waiting = pool.submit("b", gate.call, "waits")
    closing = threading.Thread(target=pool.close)
    closing.start()
    while not waiting.cancelled():
        pass
    gate.opened.set()
    closing.join(PATIENCE_SECONDS)
    assert running.result(PATIENCE_SECONDS) == "runs"
    with pytest.raises(RuntimeError):
        pool.submit("a", gate.call, "late")
