"""The heap of deadlines."""

from __future__ import annotations

import math
from operator import attrgetter
from random import Random
from typing import NamedTuple

from loraplex.engine.scheduling.deadlines import SLACK, Deadlines


class HasDeadline(NamedTuple):
    request_id: str
    deadline: float | None


def test_deadlines_come_earliest_first_and_once() -> None:
    deadlines = Deadlines(attrgetter("deadline"))
    for mortal in (HasDeadline("late", 3.0), HasDeadline("early", 1.0), HasDeadline("never", None)):
        deadlines.add(mortal)
    assert deadlines.expired(0.9) == []
    assert deadlines.expired(3.0) == ["early", "late"]
    assert deadlines.expired(1e9) == []


def test_who_has_ended_does_not_expire_and_is_forgotten() -> None:
    deadlines = Deadlines(attrgetter("deadline"))
    mortals = [HasDeadline(f"r{index}", 100.0 + index) for index in range(1000)]
    for mortal in mortals:
        deadlines.add(mortal)
    for mortal in mortals[:-1]:
        deadlines.remove(mortal)
        deadlines.remove(mortal)
    assert len(deadlines._heap) <= SLACK + 2
    assert deadlines.expired(1e9) == ["r999"]


def test_nothing_expires_before_the_earliest_deadline_and_it_does_not_lag_behind() -> None:
    rng = Random(5)
    deadlines, now = Deadlines(attrgetter("deadline")), 0.0
    live: dict[str, HasDeadline] = {}
    for number in range(3_000):
        if live and rng.random() < 0.4:
            deadlines.remove(live.pop(rng.choice(list(live))))
        else:
            mortal = HasDeadline(f"r{number}", now + rng.expovariate(0.05))
            live[mortal.request_id] = mortal
            deadlines.add(mortal)
        now += rng.random()
        due = {name for name, mortal in live.items() if (mortal.deadline or 0.0) <= now}
        assert not due or deadlines.earliest <= now
        if now >= deadlines.earliest:
            assert set(deadlines.expired(now)) == due
            assert deadlines.earliest > now
        live = {name: mortal for name, mortal in live.items() if name not in due}
    for mortal in live.values():
        deadlines.remove(mortal)
    deadlines.expired(math.inf)
    assert deadlines.earliest == math.inf
