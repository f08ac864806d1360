"""The backlog of loads, from an engine's statistics at known times."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from loraplex.adapters.status import AdapterTierStats
from loraplex.engine.fleet.load_pace import WINDOW_SECONDS, LoadPace


@dataclass
class Loading:
    """An engine that loads at a set pace, and a `LoadPace` that looks at it."""

    seconds: float = 0.0
    loaded: float = 0.0
    awaited: float = 0.0
    pace: LoadPace = field(init=False)

    def __post_init__(self) -> None:
        self.pace = LoadPace(clock=lambda: self.seconds)

    def run(self, seconds: float, *, bytes_per_second: float) -> None:
        """Load what is awaited, with a look each half second."""
        for _ in range(round(2 * seconds)):
            self.seconds += 0.5
            loaded = min(self.awaited, bytes_per_second / 2)
            self.awaited -= loaded
            self.loaded += loaded
            self.look()

    def look(self) -> None:
        tiers = AdapterTierStats(awaited_bytes=round(self.awaited), loaded_bytes=round(self.loaded))
        self.pace.add(tiers)

    def await_bytes(self, number: float) -> None:
        self.awaited += number
        self.look()


def test_without_waiting_requests_there_is_no_backlog() -> None:
    loading = Loading()
    assert loading.pace.backlog_seconds() == 0
    loading.run(10, bytes_per_second=100)
    assert loading.pace.backlog_seconds() == 0


def test_the_backlog_is_what_is_awaited_over_the_pace_so_far() -> None:
    loading = Loading()
    loading.await_bytes(5000)
    loading.run(20, bytes_per_second=100)
    assert loading.awaited == 3000
    assert loading.pace.backlog_seconds() == pytest.approx(30)


def test_time_in_which_nothing_is_awaited_does_not_count_for_the_pace() -> None:
    loading = Loading()
    loading.await_bytes(1000)
    loading.run(1000, bytes_per_second=100)
    loading.await_bytes(700)
    assert loading.pace.backlog_seconds() == pytest.approx(7)


def test_while_nothing_was_loaded_the_backlog_is_the_time_waited() -> None:
    loading = Loading()
    loading.await_bytes(1000)
    loading.seconds += 4  # without statistics: the engine's loop waits
    assert loading.pace.backlog_seconds() == pytest.approx(4)
    loading.run(2, bytes_per_second=0)
    assert loading.pace.backlog_seconds() == pytest.approx(6)


def test_loads_that_stand_still_make_the_backlog_longer() -> None:
    loading = Loading()
    loading.await_bytes(5000)
    loading.run(10, bytes_per_second=100)
    before = loading.pace.backlog_seconds()
    loading.seconds += 10
    assert loading.pace.backlog_seconds() == pytest.approx(2 * before)


def test_a_pace_that_has_changed_is_known_after_some_windows() -> None:
    loading = Loading()
    loading.await_bytes(10**9)
    loading.run(5 * WINDOW_SECONDS, bytes_per_second=100)
    loading.run(5 * WINDOW_SECONDS, bytes_per_second=1000)
    assert loading.pace.backlog_seconds() == pytest.approx(loading.awaited / 1000, rel=0.05)
