"""How many prompts replicas compute for each other, and how many bytes they hand over."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

WINDOW_SECONDS = 30


@dataclass(frozen=True, slots=True)
class HandoverFigures:
    """Of one replica, which either sends prefixes or gets them."""

    num_complete: int = 0
    """Prefixes that arrived whole."""
    num_given_up: int = 0
    """Those that were lost or late: the decode replica computed what was missing."""
    num_bytes: int = 0
    complete_per_second: float = 0.0
    """In the last `WINDOW_SECONDS`, like the next one."""
    bytes_per_second: float = 0.0


@dataclass(slots=True)
class _Second:
    at: int
    num_complete: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class _Counted:
    num_complete: int = 0
    num_given_up: int = 0
    num_bytes: int = 0
    recent: deque[_Second] = field(default_factory=lambda: deque(maxlen=WINDOW_SECONDS + 1))


class HandoverCounts:
    """Counts each handover at both of its replicas, since the API server's start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counted: dict[str, _Counted] = {}

    def add_bytes(self, source: str, target: str, num_bytes: int) -> None:
        """A piece of this size was passed on."""
        for counted in self._of_both(source, target):
            counted.num_bytes += num_bytes
            self._second(counted).num_bytes += num_bytes

    def complete(self, source: str, target: str) -> None:
        """The last piece was passed on."""
        for counted in self._of_both(source, target):
            counted.num_complete += 1
            self._second(counted).num_complete += 1

    def give_up(self, source: str, target: str) -> None:
        """The target waits no longer."""
        for counted in self._of_both(source, target):
            counted.num_given_up += 1

    def of(self, replica: str) -> HandoverFigures:
        """The figures of this replica."""
        counted = self._counted.get(replica)
        if counted is None:
            return HandoverFigures()
        since = self._clock() - WINDOW_SECONDS
        recent = [each for each in counted.recent if each.at >= since]
        return HandoverFigures(
            num_complete=counted.num_complete,
            num_given_up=counted.num_given_up,
            num_bytes=counted.num_bytes,
            complete_per_second=sum(each.num_complete for each in recent) / WINDOW_SECONDS,
            bytes_per_second=sum(each.num_bytes for each in recent) / WINDOW_SECONDS,
        )

    def forget(self, replica: str) -> None:
        """The replica has left the fleet."""
        self._counted.pop(replica, None)

    def _of_both(self, source: str, target: str) -> list[_Counted]:
        return [self._counted.setdefault(name, _Counted()) for name in (source, target)]

    def _second(self, counted: _Counted) -> _Second:
        at = int(self._clock())
        if not counted.recent or counted.recent[-1].at != at:
            counted.recent.append(_Second(at))
        return counted.recent[-1]
