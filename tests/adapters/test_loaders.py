"""Loader threads: small jobs never wait for large ones, and together they keep to their pace."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from loraplex.adapters.loaders import SMALL_BYTES, LoaderThreads, Pace, Paced

TIMEOUT_SECONDS = 60


@pytest.fixture
def threads() -> Iterator[LoaderThreads]:
    with closing(LoaderThreads(2)) as threads:
        yield threads


def test_a_small_job_does_not_wait_for_large_ones(threads: LoaderThreads) -> None:
    release = threading.Event()
    large = [threads.submit(SMALL_BYTES + 1, release.wait, TIMEOUT_SECONDS) for _ in range(3)]
    assert threads.submit(1, lambda: 7).result(TIMEOUT_SECONDS) == 7
    assert not any(job.done() for job in large)
    release.set()
    assert all(job.result(TIMEOUT_SECONDS) for job in large)


def test_small_jobs_use_all_threads(threads: LoaderThreads) -> None:
    both = threading.Barrier(2)
    jobs = [threads.submit(SMALL_BYTES, both.wait, TIMEOUT_SECONDS) for _ in range(2)]
    assert sorted(job.result(TIMEOUT_SECONDS) for job in jobs) == [0, 1]


def test_one_thread_serves_large_jobs_too() -> None:
    with closing(LoaderThreads(1)) as threads:
        assert threads.submit(SMALL_BYTES + 1, lambda: 3).result(TIMEOUT_SECONDS) == 3


def test_an_exception_is_the_jobs_result(threads: LoaderThreads) -> None:
    def fail() -> None:
        raise OSError("unreadable")

    with pytest.raises(OSError, match="unreadable"):
        threads.submit(1, fail).result(TIMEOUT_SECONDS)
    assert threads.submit(1, lambda: 1).result(TIMEOUT_SECONDS) == 1


def test_closing_cancels_what_was_not_begun() -> None:
    threads, begun, release = LoaderThreads(1), threading.Event(), threading.Event()

    def hold() -> int:
        begun.set()
        release.wait(TIMEOUT_SECONDS)
        return 5

    running = threads.submit(1, hold)
    assert begun.wait(TIMEOUT_SECONDS)
    queued = threads.submit(1, lambda: 6)
    closing_thread = threading.Thread(target=threads.close)
    closing_thread.start()
    while not queued.cancelled():
        assert closing_thread.is_alive()
    release.set()
    closing_thread.join(TIMEOUT_SECONDS)
    assert running.result(TIMEOUT_SECONDS) == 5


class Time:
    """A clock that only sleeping and working move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


def make_pace(duty: float) -> tuple[Pace, Time]:
    time = Time()
    return Pace(duty, clock=lambda: time.now, sleep=time.sleep), time


@pytest.mark.parametrize("duty", [0.1, 0.25, 0.5])
def test_work_takes_its_part_of_the_time_while_steps_run(duty: float) -> None:
    pace, time = make_pace(duty)
    pace.is_busy = True
    for _ in range(100):
        time.now += 0.002
        pace.rest(0.002)
    assert time.now == pytest.approx(0.2 / duty)


def test_threads_share_one_pace() -> None:
    """Two threads that worked at once owe twice the rest; the second waits for both."""
    pace, time = make_pace(0.5)
    pace.is_busy = True
    time.now = 1.0
    pace.rest(0.1)
    assert time.slept == pytest.approx(0.1)
    time.now = 1.0  # the other thread, at the same moment
    pace.rest(0.1)
    assert time.slept == pytest.approx(0.1 + 0.3)


def test_nobody_rests_while_nothing_runs() -> None:
    pace, time = make_pace(0.1)
    pace.rest(10.0)
    assert time.slept == 0
    pace.is_busy = True
    time.now = 50.0
    pace.rest(1.0)
    assert time.slept == pytest.approx(9.0), "idle time earns no credit and leaves no debt"


def test_the_full_duty_is_never_held_up() -> None:
    pace, time = make_pace(1.0)
    pace.is_busy = True
    pace.rest(10.0)
    assert time.slept == 0


def test_a_job_rests_for_what_it_has_worked() -> None:
    pace, time = make_pace(0.5)
    pace.is_busy = True
    work = Paced(pace)
    total = 0
    while not time.slept:
        total += sum(range(2000))
        work.pause()
    assert time.slept >= Paced.QUANTUM_SECONDS * 0.5
    assert total > 0
