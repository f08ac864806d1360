"""The heap of deadlines."""

from __future__ import annotations

from typing import NamedTuple

from loraplex.engine.scheduling.deadlines import SLACK, Deadlines


class HasDeadline(NamedTuple):
    request_id: str
    deadline: float | None


def test_deadlines_come_earliest_first_and_once() -> None:
    deadlines = Deadlines()
    for mortal in (HasDeadline("late", 3.0), HasDeadline("early", 1.0), HasDeadline("never", None)):
        deadlines.add(mortal)
    assert deadlines.expired(0.9) == []
    assert deadlines.expired(3.0) == ["early", "late"]
    assert deadlines.expired(1e9) == []


def test_who_has_ended_does_not_expire_and_is_forgotten() -> None:
    deadlines = Deadlines()
    mortals = [HasDeadline(f"r{index}", 100.0 + index) for index in range(1000)]
    for mortal in mortals:
        deadlines.add(mortal)
    for mortal in mortals[:-1]:
        deadlines.remove(mortal)
        deadlines.remove(mortal)
    assert len(deadlines._heap) <= SLACK + 2
    assert deadlines.expired(1e9) == ["r999"]
