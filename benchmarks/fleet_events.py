"""The events of `make fleet-demo`, and what clients are told meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from subprocess import CompletedProcess

from benchmarks.fleet_counts import AGENT_KILLED, Event, Moved, Told

from support.adapter_homes import AdapterHomes
from support.ray_fleet import RayFleet
from support.recovery import Watch
from support.waiting import wait_for

DRAIN_SECONDS = 6.0
SCALED_SECONDS = 6.0
"""For requests to the replica that joined, and after one has left."""
CONTROLLER_SECONDS = 60.0


@dataclass
class Trouble:
    """Kills the parts of a fleet of two replicas, drains one, and adds and removes a third."""

    fleet: RayFleet
    homes: Sequence[AdapterHomes]
    """Of each tenant."""
    told: Sequence[Told]
    """What clients were told so far; it grows."""
    say: Callable[[str], None]
    events: list[Event] = field(default_factory=list)
    moved: Moved | None = None
    """To the third replica."""

    def make(self) -> None:
        """All events, one after another."""
        first, second = self.fleet.rows()
        self._kill_agent(first)
        self._drain(second)
        self._kill_controller()
        for number in (3, 2):
            self._scale(number)

    def _kill_agent(self, replica_id: str) -> None:
        with self._noted(AGENT_KILLED):
            before = self.fleet.rows()[replica_id]
            self.fleet.kill_agent(replica_id)
            self.fleet.wait_replaced(before)

    def _drain(self, replica_id: str) -> None:
        with self._noted("replica drained"):
            self.fleet.set_draining(replica_id, is_draining=True)
            time.sleep(DRAIN_SECONDS)
            self.fleet.set_draining(replica_id, is_draining=False)

    def _kill_controller(self) -> None:
        """It is back when it says which replicas there are."""
        with self._noted("controller killed"):
            killed = self.fleet.controller_pid()
            self.fleet.kill_controller()
            wait_for(self._has_other_controller(killed), seconds=CONTROLLER_SECONDS)
            _check(self.fleet.up(len(self.fleet.rows()), "--join"))

    def _has_other_controller(self, killed: int | None) -> Callable[[], bool]:
        return lambda: self.fleet.controller_pid() not in (killed, None)

    def _scale(self, number: int) -> None:
        with self._noted(f"scaled to {number}"):
            before = self.fleet.rows()
            _check(self.fleet.command("scale", str(number)))
            self.fleet.wait_ready(number)
            for joined in self.fleet.rows().keys() - before:
                self.moved = self._moved_to(joined)
            time.sleep(SCALED_SECONDS)

    def _moved_to(self, replica_id: str) -> Moved:
        ids = list(self.fleet.rows())
        homes = [(each, each.homes(ids)) for each in self.homes]
        return Moved(
            replica_id,
            frozenset(
                name
                for each, found in homes
                for name, key in each.keys.items()
                if found[key] == replica_id
            ),
        )

    @contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        num_before, begun_at = len(self.told), time.monotonic()
        self.say(f"{name}, after {num_before} answers")
        yield
        seconds = time.monotonic() - begun_at
        for homes in self.homes:
            Watch(homes, homes.server.url).until_right(name)
        settle_seconds = time.monotonic() - begun_at - seconds
        told = self.told[num_before:]
        self.events.append(
            Event(
                event=name,
                seconds=round(seconds, 1),
                settle_seconds=round(settle_seconds, 1),
                answers=len(told),
                ended_with_code=sum(each.code is not None for each in told),
            )
        )


def _check(ended: CompletedProcess[str]) -> None:
    assert ended.returncode == 0, ended.stderr[-2000:]
