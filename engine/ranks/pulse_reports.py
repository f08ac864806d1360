"""A follower reports its signs of life to rank 0. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from ..shards.rank_pulses import RankPulse
from .commands import PulseReport
from .rank_pipe import FollowerPipe

REPORT_SECONDS = 0.4


@contextmanager
def reporting_pulse(
    pulse: RankPulse,
    pipe: FollowerPipe,
    *,
    on_lost: Callable[[], None],
    on_report: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Inside, a thread reports, whatever the main thread does.

    `on_lost`: called in the thread when rank 0 cannot be reached any more, `on_report` after each
    report.
    """
    is_over = Event()

    def report() -> None:
        while not is_over.wait(REPORT_SECONDS):
            pulse.live()
            try:
                pipe.send(PulseReport(pulse.read()))
            except OSError:
                on_lost()
                return
            on_report()

    Thread(target=report, name="rank-life", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
